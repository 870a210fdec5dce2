"""Products of rows with the matrices of experts, one matrix for each row."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from moaic.ir.coordinate_dependent import INDEX, PartBuilder, operand_at
from moaic.ir.graph import Op, Operand, Value
from moaic.ir.layout import Mesh
from moaic.ir.op_names import GROUPED_MM, GROUPED_OUTER
from moaic.ir.ops.checks import operand_count, result_count, shapes
from moaic.ir.ops.declaration import ByCoordinate, Check, Complaints, Kind, OpDecl
from moaic.ir.ops.refitting import rows_in
from moaic.ir.ops.rule_building import linear_sets, operand_types, result_types, rule_of_factors
from moaic.ir.rules import Rule, rule_from_text
from moaic.ir.types import TensorType


def _grouped_mm(op: Op) -> Rule:
    """Every row is multiplied by the matrix that its id names.

    With a leading dim the matrices fall into as many blocks, and a row is zero in all blocks but its own. A split of
    the matrices leaves the rows of the others zero.
    """
    x, weight, _ = operand_types(op)
    if len(x.shape) == 2:
        return rule_of_factors(op, [["s", "d"], ["e", "f", "d"], ["s"]], [["s", "f"]], (0,), (1,))
    return _in_blocks(op, op.results[0].type.shape[0], weight, "p s d, (p e) f d, s -> p s f")


def _grouped_outer(op: Op) -> Rule:
    """The gradient of the matrices of `moai.grouped_mm`."""
    grad, x, _ = operand_types(op)
    if len(x.shape) == 2:
        return rule_of_factors(op, [["s", "f"], ["s", "d"], ["s"]], [["e", "f", "d"]], (0,), (1,))
    blocks = max(grad.shape[0], x.shape[0])
    return _in_blocks(op, blocks, op.results[0].type, "p s f, p s d, s -> (p e) f d")


def _in_blocks(op: Op, blocks: int, matrices: TensorType, text: str) -> Rule:
    sizes = {"p": blocks, "e": matrices.shape[0] // blocks}
    sizes = {name: size for name, size in sizes.items() if size != 1}
    return rule_from_text(text, operand_types(op), result_types(op), linear_sets(op, [(0,), (1,)]), sizes)


def _flops(op: Op) -> int:
    """Each row meets one matrix."""
    left, right, ids = operand_types(op)
    shape = right.shape[-2:] if op.name == GROUPED_MM else (left.shape[-1], right.shape[-1])
    return 2 * ids.elements() * prod(shape)


def _check(spelled: str) -> Check:
    """Operands of two dims each, or of three with a dim of blocks `p`, which is the number of blocks or one."""

    def check(op: Op, mesh: Mesh) -> Complaints:
        yield from operand_count(op, 3)
        yield from result_count(op, 1)
        values = [*op.inputs(), *op.results]
        words = [
            word[len(word) - len(value.type.shape) :] for word, value in zip(spelled.split(), values, strict=False)
        ]
        plain = [
            TensorType(v.type.dtype, v.type.shape[-len(w.strip("p")) :]) for v, w in zip(values, words, strict=False)
        ]
        yield from shapes(op, " ".join(word.strip("p") for word in words), [Value(tensor) for tensor in plain], {})

    return check


def _dim_of_weight(op: Op) -> Iterator[tuple[Value, int]]:
    yield operand_at(op, 1), 0


def _dim_of_gradient(op: Op) -> Iterator[tuple[Value, int]]:
    yield op.results[0], 0


def _grouped_mm_here(work: PartBuilder, old: Op) -> None:
    x, weight, ids = work.new.operands
    work.finish(GROUPED_MM, [x, weight, _local_ids(work, operand_at(old, 1), ids)])


def _grouped_outer_here(work: PartBuilder, old: Op) -> None:
    grad, x, ids = work.new.operands
    count = work.new.results[0].type.shape[0]
    work.finish(GROUPED_OUTER, [grad, x, _local_ids(work, old.results[0], ids)], count=count)


def _local_ids(work: PartBuilder, matrices: Value, ids: Operand) -> Value:
    """Per row the index of its matrix among those that the rank holds; -1 for a matrix elsewhere."""
    assert isinstance(ids, Value)
    place = work.place(ids, matrices.type.shape[0], work.splits(matrices, 0))
    number = TensorType(INDEX, ())
    none = work.emit("aten.full", [], number, size=(), fill_value=-1, dtype=INDEX)
    return work.emit("aten.where.self", [place.here, place.index, none], place.index.type)


OPS = (
    OpDecl(
        GROUPED_MM,
        _grouped_mm,
        Kind.HEAVY,
        _flops,
        "mm",
        _check("psd efd s psf"),
        by_coordinate=ByCoordinate(_dim_of_weight, _grouped_mm_here),
        lowered=True,
        host_reads=True,
    ),
    OpDecl(
        GROUPED_OUTER,
        _grouped_outer,
        Kind.HEAVY,
        _flops,
        "mm",
        _check("psf psd s efd"),
        refit=rows_in("count"),
        by_coordinate=ByCoordinate(_dim_of_gradient, _grouped_outer_here),
        lowered=True,
        host_reads=True,
    ),
)
