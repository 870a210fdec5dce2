"""Instructions of the worker, and the sum that some of them continue inside a function.

Collectives and sends move a value along an axis of the mesh; parts, joins and sums are about micro-batches.
"""

from __future__ import annotations

from moaic.ir.collectives import COLLECTIVES, Change
from moaic.ir.graph import Op, Value
from moaic.ir.layout import Mesh
from moaic.ir.op_names import (
    ACCUMULATE,
    ADD_TO,
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    FIRST,
    JOIN,
    PART,
    REDUCE_SCATTER,
    SEND,
    SHARD,
)
from moaic.ir.ops.checks import operand_count, result_count, whole_number
from moaic.ir.ops.declaration import Complaints, Kind, OpDecl
from moaic.ir.ops.rule_building import elementwise, whole_rule
from moaic.ir.printer import render_attr, render_type
from moaic.ir.types import TensorType


def _change(states: Change) -> str:
    return " into ".join(state.__name__.lower() for state in states)


def _check_move(op: Op, mesh: Mesh) -> Complaints:
    """One value moved along an axis: a collective changes its layout, a send its owner rank."""
    yield from operand_count(op, 1)
    yield from result_count(op, 1)
    axis = op.attrs.get("axis")
    if not isinstance(axis, str) or axis not in mesh.sizes:
        yield f"attribute `axis` is `{render_attr(axis)}`, no axis of the mesh {mesh}"
        return
    before, after = next(op.inputs()).type, op.results[0].type
    sides = f"operand `{render_type(before, mesh)}`, result `{render_type(after, mesh)}`"
    complaints = _send(axis, before, after) if op.name == SEND else _collective(op.name, axis, before, after)
    yield from (f"{complaint}: {sides}" for complaint in complaints)


def _collective(name: str, axis: str, before: TensorType, after: TensorType) -> Complaints:
    if (before.dtype, before.shape) != (after.dtype, after.shape):
        yield "operand and result differ in more than their layout"
    have, want = before.layout.state(axis), after.layout.state(axis)
    wanted, found = COLLECTIVES[name], (type(have), type(want))
    if found != wanted or have == want:
        yield f"over `{axis}` it turns {_change(wanted)}, not {_change(found)}"
    if before.anywhere().layout.without(axis) != after.anywhere().layout.without(axis):
        yield f"it changes more than axis `{axis}`"


def _send(axis: str, before: TensorType, after: TensorType) -> Complaints:
    source, target = before.layout.owner_on(axis), after.layout.owner_on(axis)
    if source is None or target is None or source == target:
        yield f"it brings a value from one rank of `{axis}` to another"
    elif before != after.with_layout(after.layout.with_owner(axis, source)):
        yield f"operand and result differ in more than the rank of `{axis}`"


def _check_part(op: Op, mesh: Mesh) -> Complaints:
    """The result is part `index` of `count` equal parts of the local operand."""
    yield from operand_count(op, 1)
    yield from result_count(op, 1)
    yield from whole_number(op, "index", "count", "dim", "stride")
    yield from _parts(next(op.inputs()).type, [op.results[0].type], op, _number(op, "count"), mesh)
    if _number(op, "index") >= _number(op, "count"):
        yield f"there is no part {op.attrs['index']} of {op.attrs['count']}"


def _check_join(op: Op, mesh: Mesh) -> Complaints:
    yield from operand_count(op, max(1, len(op.operands)))
    yield from result_count(op, 1)
    yield from whole_number(op, "dim", "stride")
    parts = [value.type for value in op.inputs()]
    yield from _parts(op.results[0].type, parts, op, len(parts), mesh)


def _parts(whole: TensorType, parts: list[TensorType], op: Op, count: int, mesh: Mesh) -> Complaints:
    """`parts` are each one of `count` equal parts of `whole` along the op's dim, on every rank."""
    dim, stride = _number(op, "dim"), _number(op, "stride")
    local = whole.local_shape(mesh)
    if dim >= len(local):
        yield f"there is no dim {dim} in `{render_type(whole, mesh)}`"
    elif count < 1 or stride < 1 or local[dim] % (count * stride):
        yield f"dim {dim}, {local[dim]} on each rank, does not divide into {count} parts with stride {stride}"
    else:
        wanted = (*local[:dim], local[dim] // count, *local[dim + 1 :])
        for part in parts:
            if part.dtype != whole.dtype or part.local_shape(mesh) != wanted:
                side = f"`{render_type(part, mesh)}` is no part of `{render_type(whole, mesh)}`"
                yield f"{side}: on each rank {list(part.local_shape(mesh))}, not {list(wanted)}"


def _number(op: Op, name: str) -> int:
    value = op.attrs[name]
    assert isinstance(value, int)
    return value


def _check_accumulate(op: Op, mesh: Mesh) -> Complaints:
    """The first operand is the sum so far, absent before the first term; the element type may change on the way.

    Both operands are absent where a sum begins at zeros.
    """
    if op.operands != (None, None) and (len(op.operands) != 2 or not isinstance(op.operands[1], Value)):
        yield "it takes a sum, absent at first, and what is added to it"
    yield from result_count(op, 1)
    result = op.results[0].type
    for value in op.inputs():
        if (value.type.shape, value.type.layout) != (result.shape, result.layout):
            yield f"the sum is `{render_type(result, mesh)}`, an operand `{render_type(value.type, mesh)}`"


def _check_add_to(op: Op, mesh: Mesh) -> Complaints:
    """The sum so far and a term; the result has the sum's type."""
    yield from operand_count(op, 2)
    yield from result_count(op, 1)
    total, *terms = (value.type for value in op.inputs())
    if total != op.results[0].type:
        yield f"the sum is `{render_type(total, mesh)}`, the result `{render_type(op.results[0].type, mesh)}`"
    for term in terms:
        if (term.shape, term.layout) != (total.shape, total.layout):
            yield f"the sum is `{render_type(total, mesh)}`, what is added to it `{render_type(term, mesh)}`"


_LINEAR = elementwise((0,))

OPS = (
    OpDecl(ALL_REDUCE, _LINEAR, Kind.INSTRUCTION, check=_check_move, in_place=True),
    OpDecl(REDUCE_SCATTER, _LINEAR, Kind.INSTRUCTION, check=_check_move),
    OpDecl(ALL_GATHER, _LINEAR, Kind.INSTRUCTION, check=_check_move),
    OpDecl(ALL_TO_ALL, _LINEAR, Kind.INSTRUCTION, check=_check_move),
    OpDecl(SHARD, _LINEAR, Kind.INSTRUCTION, check=_check_move, memory_passes=2),
    OpDecl(FIRST, _LINEAR, Kind.INSTRUCTION, check=_check_move, memory_passes=2),
    OpDecl(SEND, whole_rule, Kind.INSTRUCTION, check=_check_move),
    OpDecl(PART, whole_rule, Kind.INSTRUCTION, check=_check_part, rank_local=True, memory_passes=2),
    OpDecl(JOIN, whole_rule, Kind.INSTRUCTION, check=_check_join, rank_local=True, memory_passes=2),
    OpDecl(ACCUMULATE, whole_rule, Kind.INSTRUCTION, check=_check_accumulate, in_place=True, memory_passes=3),
    OpDecl("call", whole_rule, Kind.INSTRUCTION),
    OpDecl(ADD_TO, elementwise((0, 1)), check=_check_add_to, lowered=True),
)
