"""Rewrites of ops that move elements and compute none: views, copies, slices, permutations, concatenation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor

from moaic.capture.fx.attributes import from_front
from moaic.capture.fx.op_call import OpCall, Rewrite, cast_to_result, each_of, expanded, reshaped, viewed
from moaic.capture.provenance import described
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Attr, Value


def _same(call: OpCall) -> Value:
    """The operand itself: values of the IR are never written, so a copy or an alias is the value.

    %1 = aten.clone %0      (%0 takes the place of %1)
    """
    return call.x


def _view(call: OpCall) -> Value:
    return reshaped(call, call.x)


def _expand(call: OpCall) -> Value:
    return expanded(call, call.x, call.type.shape)


def _copy(call: OpCall) -> Value:
    source = call.operands[1]
    assert isinstance(source, Value)
    return expanded(call, cast_to_result(call, source), call.type.shape)


def _slice(call: OpCall) -> Value:
    dim = from_front(call.attrs.get("dim", 0), len(call.x.type.shape))
    assert isinstance(dim, int)
    size = call.x.type.shape[dim]
    if call.x.type.shape == call.type.shape and call.attrs.get("step", 1) == 1:
        return call.x
    start, end = (_clamped(call.attrs.get(name), size, unset) for name, unset in (("start", 0), ("end", size)))
    step = call.attrs.get("step", 1)
    assert isinstance(step, int)
    if step == 1:
        return call.emit_as("aten.slice.Tensor", [call.x], {"dim": dim, "start": start, "end": end})
    if call.type.shape[dim] * step == size:
        return _one_per_run(call, dim, start, step)
    return call.emit_as("aten.slice.Tensor", [call.x], {"dim": dim, "start": start, "end": end, "step": step})


def _one_per_run(call: OpCall, dim: int, index: int, step: int) -> Value:
    """The element at `index` of every run of `step` elements: a rule can shard the dim of runs, not a strided slice.

    %1 = aten.slice.Tensor %0 {dim = 0, start = 1, end = 8, step = 2}      // %0: f32[8]
    %1 = aten.view %0 {size = (4, 2)}
    %2 = aten.select.int %1 {dim = 1, index = 1}
    """
    before, after = call.x.type.shape[:dim], call.x.type.shape[dim + 1 :]
    runs = viewed(call, call.x, (*before, call.type.shape[dim], step, *after))
    return call.emit("aten.select.int", runs, dim=dim + 1, index=index)


def _clamped(bound: Attr, size: int, unset: int) -> int:
    """A bound of a slice, counted from the front and inside the dim."""
    if bound is None:
        return unset
    assert isinstance(bound, int)
    return min(max(bound + size if bound < 0 else bound, 0), size)


def _pad(call: OpCall) -> Value:
    pads = call.attrs["pad"]
    assert isinstance(pads, tuple)
    return call.emit_as("aten.constant_pad_nd", [call.x], call.attrs) if any(pads) else call.x


def _permute(call: OpCall) -> Value:
    rank = len(call.x.type.shape)
    order = list(range(rank))
    if call.name == "aten.permute":
        dims = from_front(call.attrs["dims"], rank)
        assert isinstance(dims, tuple)
        order = [dim for dim in dims if isinstance(dim, int)]
    elif rank > 1:
        one, other = (from_front(call.attrs.get(name, dim), rank) for dim, name in enumerate(("dim0", "dim1")))
        assert isinstance(one, int)
        assert isinstance(other, int)
        order[one], order[other] = order[other], order[one]
    return _permuted(call, call.x, order)


def _permuted(call: OpCall, x: Value, order: list[int]) -> Value:
    """`x` with its dims in `order`; a permutation of a permutation becomes one, or none.

    %1 = aten.permute %0 {dims = (1, 0, 2)}      %2 = aten.permute %0 {dims = (1, 2, 0)}
    %2 = aten.permute %1 {dims = (0, 2, 1)}
    """
    inner = call.builder.operand_behind(x, "aten.permute")
    if inner is not None:
        x, before = inner[0], inner[1]["dims"]
        assert isinstance(before, tuple)
        order = [dim for index in order if isinstance(dim := before[index], int)]
    return x if order == sorted(order) else call.emit("aten.permute", x, dims=tuple(order))


def _cat(call: OpCall) -> Value:
    """The concatenation without empty tensors, such as an empty cache: a dim of size 0 cannot be sharded."""
    operand = call.operands[0]
    assert isinstance(operand, tuple)
    given = [value for value in operand if value is not None and value.type.elements()]
    if len(given) == 1:
        return cast_to_result(call, given[0])
    has_its_type = any(value.type.dtype == call.type.dtype for value in given)
    dim = from_front(call.attrs.get("dim", 0), len(call.type.shape))
    return call.emit_as("aten.cat", [tuple(given) if has_its_type else operand], {"dim": dim})


def _as_strided(call: OpCall) -> Value:
    """The operand reshaped: legal if strides alone change, or if operand and result are contiguous.

    Any other `as_strided` reads elements in an order that values of the IR do not have.
    """
    before, result = call.example_source, call.example_result
    same = before.shape == result.shape and _strides(before) == _strides(result)
    dense = before.is_contiguous() and result.is_contiguous() and before.numel() == result.numel()
    if result.storage_offset() == before.storage_offset() and (same or dense):
        return _view(call)
    raise _own_order(call, "as_strided", "reads")


def _as_strided_scatter(call: OpCall) -> Value:
    """The written tensor reshaped, if it overwrites every element of a contiguous base in order."""
    if not call.example_source.is_contiguous():
        raise _own_order(call, "as_strided_scatter", "writes")
    written = call.operands[1]
    assert isinstance(written, Value)
    size, stride = (cast("Sequence[int]", call.attrs[name]) for name in ("size", "stride"))
    covers = written.type.elements() == call.example_result.numel() and not call.attrs.get("storage_offset")
    if covers and torch.empty_strided(size, stride, device="meta").is_contiguous():
        return reshaped(call, written)
    return call.emit_as(call.name, call.operands, call.attrs)


def _own_order(call: OpCall, name: str, does: str) -> Diagnostic:
    return Diagnostic(
        f"`{name}` {does} a tensor in an order of its own{described(call.builder.loc)}",
        hint="use view, slices or expand in its place",
    )


def _strides(tensor: Tensor) -> list[Any]:
    """Strides of the dims of more than one element; the others are arbitrary."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]


SHAPE_REWRITES: Final[Mapping[str, Rewrite]] = {
    **each_of(
        """aten.alias aten.clone aten.detach aten.lift_fresh aten.lift_fresh_copy aten.resolve_conj aten.resolve_neg
        prims.view_of prims.clone prims.device_put""",
        _same,
    ),
    **each_of("aten._to_copy prims.convert_element_type", cast_to_result),
    **each_of(
        """aten.view aten._unsafe_view aten.reshape aten.unsqueeze aten.squeeze aten.squeeze.dim aten.squeeze.dims
        prims.collapse_view prims.split_dim""",
        _view,
    ),
    "aten.expand": _expand,
    "aten.copy": _copy,
    "aten.cat": _cat,
    "aten.slice.Tensor": _slice,
    "aten.constant_pad_nd": _pad,
    **each_of("aten.permute aten.transpose.int aten.t", _permute),
    "aten.as_strided": _as_strided,
    "aten.as_strided_scatter": _as_strided_scatter,
}
