"""Random numbers: each element is a function of a key and of its own index in the global tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from moaic.ir.coordinate_dependent import PartBuilder
from moaic.ir.graph import Attr, Op, Value
from moaic.ir.layout import Mesh, Split
from moaic.ir.op_names import FOLD_KEY, RAND
from moaic.ir.ops.checks import operand_count, result_count, whole_number
from moaic.ir.ops.declaration import ByCoordinate, Complaints, Kind, OpDecl
from moaic.ir.ops.rule_building import factor_names, operand_types, rule_of_factors, whole_rule
from moaic.ir.printer import render_attr, render_type
from moaic.ir.rules import Rule
from moaic.ir.types import TensorType

KEY = TensorType("i64", (2,))


def _rand(op: Op) -> Rule:
    """Any dim splits, since an element depends on the key and its own index alone; key and coordinates are whole."""
    shape = op.results[0].type.shape
    _, *coordinates = operand_types(op)
    operands = [["key!"], *([f"at{i}!"] * len(t.shape) for i, t in enumerate(coordinates))]
    return rule_of_factors(op, operands, [factor_names(len(shape))])


def _check_rand(op: Op, mesh: Mesh) -> Complaints:
    """A global op has a key alone; a local one also the coordinates of the part that it makes."""
    splits = op.attrs.get("splits", ())
    if not isinstance(splits, tuple):
        yield f"attribute `splits` is `{render_attr(splits)}`, not a list"
        return
    yield from operand_count(op, 1 + len(splits))
    yield from result_count(op, 1)
    key, *coordinates = (value.type for value in op.inputs())
    if key.anywhere() != KEY:
        yield f"the key is `{render_type(KEY, mesh)}`, not `{render_type(key, mesh)}`"
    for given in coordinates:
        if given.dtype != "i64" or given.elements() != 1:
            yield f"a coordinate is one i64, not `{render_type(given, mesh)}`"


def _check_fold_key(op: Op, mesh: Mesh) -> Complaints:
    yield from operand_count(op, 1)
    yield from result_count(op, 1)
    yield from whole_number(op, "instance")
    for value in (*op.inputs(), *op.results):
        if value.type.anywhere() != KEY:
            yield f"a key is `{render_type(KEY, mesh)}`, not `{render_type(value.type, mesh)}`"


def _split_dims(op: Op) -> Iterator[tuple[Value, int]]:
    (result,) = op.results
    yield from ((result, dim) for dim in range(len(result.type.shape)))


def _rand_part(work: PartBuilder, old: Op) -> None:
    """States which elements of the global tensor the part holds; splits recorded for earlier axes stay.

    Before: %r = moai.rand %k : f32[8{dp, tp}, 3]
    After: %r = moai.rand %k, %dp, %tp {global_shape = [8, 3], splits = [[0, 4, 2], [0, 2, 2]]} : f32[2, 3]
    """
    tensor = old.results[0].type
    known = old.attrs.get("splits", ())
    assert isinstance(known, tuple)
    taken = [split for split in tensor.layout.splits if split.axis in work.coordinates]
    splits = (*known, *((split.dim, _stride_before(split, known), work.mesh.size(split.axis)) for split in taken))
    operands = (*work.new.operands, *(work.coordinates[split.axis] for split in taken))
    attrs = {"global_shape": tensor.shape, **work.new.attrs, "splits": splits}
    work.ops.append(replace(work.new, operands=operands, attrs=attrs))


def _stride_before(split: Split, known: Sequence[Attr]) -> int:
    """The stride of `split` in the tensor that the splits in `known` have not yet cut."""
    stride = split.stride
    for dim, taken, ranks in sorted(_triple(one) for one in known):
        if dim == split.dim and stride >= taken:
            stride *= ranks
    return stride


def _triple(split: Attr) -> tuple[int, int, int]:
    assert isinstance(split, tuple)
    dim, stride, ranks = split
    assert isinstance(dim, int)
    assert isinstance(stride, int)
    assert isinstance(ranks, int)
    return dim, stride, ranks


OPS = (
    OpDecl(
        RAND,
        _rand,
        cost="costly",
        check=_check_rand,
        by_coordinate=ByCoordinate(_split_dims, _rand_part, always=True),
        exact=True,
        lowered=True,
    ),
    OpDecl(FOLD_KEY, whole_rule, Kind.NULLARY, check=_check_fold_key, exact=True, lowered=True),
)
