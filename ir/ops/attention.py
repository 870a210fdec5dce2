"""Attention and its backward, on one rank or in a ring of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moaic.ir.attention import ATTENTION, causal_divisor, is_causal, mask_of, query_at, query_key_value
from moaic.ir.coordinate_dependent import PartBuilder, broadcast_type, operand_at
from moaic.ir.graph import Op, Value
from moaic.ir.layout import Mesh
from moaic.ir.op_names import RING, RING_BACKWARD, SDPA, SDPA_BACKWARD
from moaic.ir.ops.checks import layouts_follow_rule, operand_count, result_count, shapes
from moaic.ir.ops.declaration import ByCoordinate, Check, Complaints, Kind, OpDecl
from moaic.ir.ops.rule_building import operand_types, rule_of_factors
from moaic.ir.printer import render_attr, render_type
from moaic.ir.ring_attention import around, attention_of, is_ring, ring_rule, why_not
from moaic.ir.rules import Rule
from moaic.ir.types import TensorType

_QUERY, _KEY, _VALUE = ["b", "h", "q", "d!"], ["b", "h", "k!", "d!"], ["b", "h", "k!", "e!"]
_OUTPUT, _LOGSUMEXP = ["b", "h", "q", "e!"], ["b", "h", "q"]


def _sdpa(op: Op) -> Rule:
    """Rows of queries are independent; each attends to all keys."""
    return rule_of_factors(op, [_QUERY, _KEY, _VALUE, *_mask(op, 3)], [_OUTPUT, _LOGSUMEXP])


def _sdpa_backward(op: Op) -> Rule:
    operands = [_OUTPUT, _QUERY, _KEY, _VALUE, _OUTPUT, _LOGSUMEXP, *_mask(op, 6)]
    return rule_of_factors(op, operands, [_QUERY, _KEY, _VALUE], (0,))


def _mask(op: Op, at: int) -> list[list[str]]:
    types = operand_types(op)[at:]
    return [["b", "h", "q", "k!"][4 - len(t.shape) :] for t in types]


def _flops(op: Op) -> int:
    q, k, v = operand_types(op)[:3]
    b, h, rows, width = q.shape
    return 2 * b * h * rows * k.shape[2] * (width + v.shape[3]) // causal_divisor(is_causal(op))


def _flops_backward(op: Op) -> int:
    q, k, v = operand_types(op)[1:4]
    b, h, rows, width = q.shape
    return 5 * b * h * rows * k.shape[2] * (width + v.shape[3]) // causal_divisor(is_causal(op))


def _check(op: Op, mesh: Mesh) -> Complaints:
    counts = [*operand_count(op, 3, 4), *result_count(op, 2)]
    operands = [operand for operand in op.operands[:3] if isinstance(operand, Value)]
    misfits = counts or [*shapes(op, "bhqd bhkd bhke bhqe bhq", [*operands, *op.results], {})]
    yield from misfits or _mask_misfits(op, mesh)
    yield from _check_attrs(op)


def _check_backward(op: Op, mesh: Mesh) -> Complaints:
    counts = [*operand_count(op, 6, 7), *result_count(op, 3)]
    operands = [operand for operand in op.operands[:6] if isinstance(operand, Value)]
    misfits = counts or [*shapes(op, "bhqe bhqd bhkd bhke bhqe bhq bhqd bhkd bhke", [*operands, *op.results], {})]
    yield from misfits or _mask_misfits(op, mesh)
    yield from _check_attrs(op)


def _check_attrs(op: Op) -> Complaints:
    if not isinstance(op.attrs.get("is_causal", False), bool):
        yield f"attribute `is_causal` is `{render_attr(op.attrs['is_causal'])}`, not true or false"
    if not isinstance(op.attrs.get("scale"), float | None):
        yield f"attribute `scale` is `{render_attr(op.attrs['scale'])}`, not a number such as 0.125"


def _in_ring(check_attention: Check) -> Check:
    """The check of ring attention: one block of each value per rank of the axis, other layouts by its rule."""

    def check(op: Op, mesh: Mesh) -> Complaints:
        complaints = [*check_attention(op, mesh)]
        yield from complaints
        axis = op.attrs.get("axis")
        if not isinstance(axis, str) or axis not in mesh.sizes:
            yield f"attribute `axis` is `{render_attr(axis)}`, no axis of the mesh {mesh}"
            return
        if complaints:
            return
        if why := why_not(op, mesh.size(axis)):
            yield why
            return
        stripes = op.attrs.get("stripes", mesh.size(axis))
        if stripes != mesh.size(axis):
            yield f"attribute `stripes` is `{render_attr(stripes)}`, and `{axis}` has {mesh.size(axis)} ranks"
            return
        strategy = around(op, mesh.size(axis))
        values, states = (*op.inputs(), *op.results), (*strategy.operands, *strategy.results)
        for value, state in zip(values, states, strict=True):
            if value.type.layout.state(axis) != state:
                yield f"over `{axis}` `{render_type(value.type, mesh)}` is to be {state} in a ring"
        yield from layouts_follow_rule(op, ring_rule, mesh)

    return check


def _mask_misfits(op: Op, mesh: Mesh) -> Complaints:
    """Why the mask, if there is one, does not broadcast."""
    query, key, _ = query_key_value(op)
    mask = mask_of(attention_of(op) if is_ring(op) else op)
    if mask is None:
        return
    wanted = (*query.type.shape[:3], key.type.shape[2])
    shape = mask.type.shape
    if len(shape) > 4 or any(one not in (1, other) for one, other in zip(shape[::-1], wanted[::-1], strict=False)):
        yield f"the mask `{render_type(mask.type, mesh)}` does not broadcast to {list(wanted)}"


def _causal_rows(op: Op) -> Iterator[tuple[Value, int]]:
    if is_causal(op):
        yield operand_at(op, query_at(op)), 2


def _causal_mask(work: PartBuilder, old: Op) -> None:
    """The causal flag spelled out as a mask: the rank's rows begin at its coordinate, not at 0.

    Before: %o, %l = moai.sdpa %q, %k, %v, _ {is_causal = true} : f32[2, 4, 8{cp}, 5], ...
    After: %m = aten.le.Tensor (indices of the columns), (indices of the rank's rows) : bool[4, 8]
           %o, %l = moai.sdpa %q, %k, %v, %m {is_causal = false} : f32[2, 4, 4, 5], ...
    """
    query, key, _ = query_key_value(work.new)
    whole, _, _ = query_key_value(old)
    rows, columns = query.type.shape[2], key.type.shape[2]
    row = work.view(work.positions(rows, work.splits(whole, 2)), (rows, 1))
    allowed_type = TensorType("bool", (rows, columns))
    allowed = work.emit("aten.le.Tensor", [work.positions(columns, ()), row], allowed_type)
    given = mask_of(work.new)
    mask = allowed if given is None else _both(work, allowed, given)
    operands = (*work.new.operands[: ATTENTION[old.name]], mask)
    work.ops.append(replace(work.new, operands=operands, attrs={**old.attrs, "is_causal": False}))


def _both(work: PartBuilder, allowed: Value, given: Value) -> Value:
    """A mask of bools is intersected; one of terms gets minus infinity where attention is not allowed."""
    if given.type.dtype == "bool":
        return work.both(allowed, given)
    number = TensorType(given.type.dtype, ())
    never = work.emit("aten.full", [], number, size=(), fill_value=float("-inf"), dtype=number.dtype)
    return work.emit("aten.where.self", [allowed, given, never], broadcast_type(number.dtype, allowed, given))


_BY_ROW = ByCoordinate(_causal_rows, _causal_mask)

OPS = (
    OpDecl(SDPA, _sdpa, Kind.HEAVY, _flops, "sdpa", _check, by_coordinate=_BY_ROW, lowered=True),
    OpDecl(
        SDPA_BACKWARD,
        _sdpa_backward,
        Kind.HEAVY,
        _flops_backward,
        "sdpa_backward",
        _check_backward,
        by_coordinate=_BY_ROW,
        lowered=True,
    ),
    OpDecl(RING, ring_rule, Kind.INSTRUCTION, _flops, check=_in_ring(_check)),
    OpDecl(RING_BACKWARD, ring_rule, Kind.INSTRUCTION, _flops_backward, check=_in_ring(_check_backward)),
)
