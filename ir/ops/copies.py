"""Ops that copy elements to other places: concatenation, padding, reversal, and writes into a slice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moaic.ir.coordinate_dependent import PartBuilder
from moaic.ir.graph import Op, Value
from moaic.ir.layout import Layout, Mesh
from moaic.ir.op_names import REPEAT_LAST
from moaic.ir.ops.checks import operand_count, result_count
from moaic.ir.ops.declaration import ByCoordinate, Complaints, OpDecl
from moaic.ir.ops.refitting import dim_from_front
from moaic.ir.ops.rule_building import (
    attr_int,
    attr_ints,
    from_front,
    linear_sets,
    operand_types,
    rule_of_factors,
    whole_dim,
    whole_dims,
    whole_rule,
)
from moaic.ir.ops.views import diagonal, equal_parts
from moaic.ir.printer import render_type
from moaic.ir.rules import Rule


def _cat(op: Op) -> Rule:
    target = op.results[0].type
    dim = from_front(attr_int(op, "dim"), len(target.shape))
    if any(len(t.shape) != len(target.shape) for t in operand_types(op)):
        return whole_rule(op)
    parts = {t.shape[dim] for t in operand_types(op)}
    if len(parts) == 1 and 0 not in parts:
        whole, part, sizes = equal_parts(dim, target, parts.pop())
        return Rule((part,) * len(operand_types(op)), (whole,), sizes, frozenset({"p"}), linear_sets(op, [(0,)]))
    return whole_dim((0,))(op)


def _pad(op: Op) -> Rule:
    """Padded dims are whole; linear where zeros are padded."""
    source, target = operand_types(op)[0].shape, op.results[0].type.shape
    pads = attr_ints(op, "pad")
    rank = len(source)
    padded = {rank - 1 - i // 2 for i, pad in enumerate(pads) if pad}
    linear = [(0,)] if op.attrs.get("value", 0.0) in (0, 0.0, None) else []
    left = [f"l{i}!" if i in padded else f"d{i}" for i in range(len(source))]
    right = [f"r{i}!" if i in padded else f"d{i}" for i in range(len(target))]
    return rule_of_factors(op, [left], [right], *linear)


def _flip(op: Op) -> Rule:
    return whole_dims(op, attr_ints(op, "dims"), (0,))


def _repeat_last(op: Op) -> Rule:
    """A part of the longer dim is made from the whole of the shorter."""
    names = [f"d{i}" for i in range(len(op.results[0].type.shape))]
    dim = dim_from_front(op)
    source, target = [*names], [*names]
    source[dim], target[dim] = "l!", "r"
    return rule_of_factors(op, [source], [target], (0,))


def _check_repeat_last(op: Op, mesh: Mesh) -> Complaints:
    yield from operand_count(op, 1)
    yield from result_count(op, 1)
    before, after = next(op.inputs()).type, op.results[0].type
    dim = dim_from_front(op)
    rest, longer = list(before.shape), list(after.shape)
    if len(rest) != len(longer) or dim >= len(rest) or not 0 < rest.pop(dim) <= longer.pop(dim) or rest != longer:
        yield f"`{render_type(before, mesh)}` with a longer dim {dim} is not `{render_type(after, mesh)}`"


def _repeated_dim(op: Op) -> Iterator[tuple[Value, int]]:
    yield op.results[0], dim_from_front(op)


def _part_of_repeated(work: PartBuilder, old: Op) -> None:
    """Takes the elements that the rank holds, those after the last from the last.

    Before: %y = moai.repeat_last %x {dim = 0} : f32[6{dp}, 3], of f32[5, 3]
    After: %i = aten.add.Tensor ... the indices of the rank's part, from its coordinate %dp
           %j = aten.clamp %i {max = 4} : i64[3]
           %y = aten.index.Tensor %x, [%j] : f32[3, 3]
    """
    (result,), (source,) = work.new.results, work.new.inputs()
    dim = dim_from_front(old)
    others = Layout(tuple(replace(split, dim=0) for split in result.type.layout.on_dim(dim)))
    along = work.positions(result.type.shape[dim], work.splits(old.results[0], dim), others)
    known = work.emit("aten.clamp", [along], along.type, min=0, max=source.type.shape[dim] - 1)
    work.finish("aten.index.Tensor", [source, (*(None for _ in range(dim)), known)])


OPS = (
    OpDecl("aten.cat", _cat, exact=True),
    OpDecl("aten.constant_pad_nd", _pad, exact=True),
    OpDecl("aten.flip", _flip, exact=True),
    OpDecl("aten.slice_scatter", whole_dim((0, 1)), exact=True),
    OpDecl("aten.diagonal_scatter", diagonal),
    OpDecl(
        REPEAT_LAST,
        _repeat_last,
        check=_check_repeat_last,
        by_coordinate=ByCoordinate(_repeated_dim, _part_of_repeated),
        exact=True,
        lowered=True,
    ),
)
