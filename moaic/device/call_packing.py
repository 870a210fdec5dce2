"""Walks the arguments of an op once: the key of the call, and what differs between calls with this key.

The key holds element types, shapes, strides and all literals. It leaves out the values of scalars, so that a learning
rate that changes with every step costs nothing, and the offsets of views, so that slices of one tensor have one key.
Where operands are is left to the accelerator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import repeat
from typing import Any, Final, NamedTuple, cast

import torch

from moaic.device.handles import Geometry, is_ours, view_of
from moaic.runtime.controller.buffer import Buffer, storage_geometry
from moaic.runtime.controller.eager_call import CallForm, EagerCall, take_apart
from moaic.runtime.protocol.aten_schema import ArgKind, Signature
from moaic.runtime.protocol.combination import REDUCTIONS

_tuple: Any = tuple
_new: Final[Callable[..., Any]] = _tuple.__new__
"""Makes a NamedTuple in half the time that its own `__new__` takes, which is written in Python."""
_default_dtype: Final = torch.get_default_dtype

_TENSOR: Final = ArgKind.TENSOR
_TENSORS: Final = ArgKind.TENSORS
_NUMBER: Final = ArgKind.NUMBER
_NUMBERS: Final = ArgKind.NUMBERS


class MixedDevices(RuntimeError):
    """An operand is on the host and is not a 0-dim tensor."""


class PackedCall(NamedTuple):
    """A call's key, and the buffers, offsets and scalars of the `EagerCall` in the order of the arguments."""

    key: tuple[Any, ...]
    buffers: list[Buffer]
    offsets: list[int]
    """Of the tensors that are not the whole of their buffer."""
    scalars: list[Any]

    def eager(self, form: CallForm) -> EagerCall:
        return _new(EagerCall, (form, self.buffers, self.offsets, self.scalars))


Packer = Callable[[tuple[Any, ...], dict[str, Any]], PackedCall]


def packer(signature: Signature) -> Packer:
    """Packs calls of one op; raises MixedDevices."""
    # How workers run a reduction depends on the values of its scalars, which are part of the form.
    has_scalars = signature.name not in REDUCTIONS
    literal = {} if has_scalars else {_NUMBER: ArgKind.LITERAL, _NUMBERS: ArgKind.LITERAL}
    kinds = tuple(literal.get(kind, kind) for kind in signature.kinds)
    by_name = dict(zip(signature.names, kinds, strict=True))

    def pack(args: tuple[Any, ...], kwargs: dict[str, Any]) -> PackedCall:
        key: list[Any] = [_default_dtype()]
        buffers: list[Buffer] = []
        offsets: list[int] = []
        scalars: list[Any] = []
        _walk(kinds, args, key, buffers, offsets, scalars)
        for name, value in kwargs.items():
            kind = by_name[name]
            if kind is ArgKind.PLACEMENT:
                check_placement(name, value)
            else:
                key.append(name)
                _walk((kind,), (value,), key, buffers, offsets, scalars)
        return _new(PackedCall, (_tuple(key), buffers, offsets, scalars if has_scalars else []))

    return pack


def check_placement(name: str, value: Any) -> None:
    """Refuse a device, a layout or pinning that the device does not have."""
    if name == "device" and value is not None and value.index not in (None, 0):
        raise RuntimeError(f"there is one device moai, moai:0, not {value}; its workers are not devices of their own")
    if name == "pin_memory" and value:
        raise RuntimeError("only tensors on the cpu can be pinned, not tensors on device moai")
    if name == "layout" and value not in (None, torch.strided):
        raise NotImplementedError(f"device moai holds dense tensors only, not {value}")


def _walk(
    kinds: Iterable[ArgKind],
    values: Iterable[Any],
    key: list[Any],
    buffers: list[Buffer],
    offsets: list[int],
    scalars: list[Any],
) -> None:
    """Append each value to the lists; the inner loop of every eager op."""
    for kind, value in zip(kinds, values, strict=False):
        if kind is _TENSOR:
            try:
                buffer = value.untyped_storage().moai
            except AttributeError:
                buffer = None
            if buffer is None:  # outside of the handler, whose error would be printed with that of the operand
                _walk_other_operand(value, key, scalars)
                continue
            buffers.append(buffer)
            key.append(buffer.geometry)
            key.append(value.dtype)
            shape, strides, offset = value.shape, value.stride(), value.storage_offset()
            if offset or shape != buffer.shape or strides != buffer.strides:
                key.append((shape, strides))
                offsets.append(offset)
        elif kind is _NUMBER:
            _walk_number(value, key, scalars)
        elif kind is _TENSORS:
            key.append(len(value))
            _walk(repeat(_TENSOR), value, key, buffers, offsets, scalars)
        elif kind is _NUMBERS:
            key.append(len(value))
            for number in value:
                _walk_number(number, key, scalars)
        else:
            _walk_literal(value, key, scalars)


def _walk_number(value: Any, key: list[Any], scalars: list[Any]) -> None:
    """A number or None; its type is part of the key, its value is not."""
    type_ = cast("type[Any]", type(value))
    key.append(type_)
    if type_ is int or type_ is float:
        scalars.append(value)
    elif type_ is bool:  # it is sent as a literal
        key.append(value)
    elif type_ is complex:
        scalars += (value.real, value.imag)


def _walk_literal(value: Any, key: list[Any], scalars: list[Any]) -> None:
    """A value, or a list of values, that is part of the key. Its numbers are sent as scalars all the same."""
    type_ = cast("type[Any]", type(value))
    if type_ is list or type_ is tuple or type_ is torch.Size:
        key.append(_tuple(value))
        for item in value:
            _walk_literal_scalar(item, scalars)
        return
    key += (type_, value)  # arange(6.0) is not arange(6), though 6.0 == 6
    _walk_literal_scalar(value, scalars)


def _walk_literal_scalar(value: Any, scalars: list[Any]) -> None:
    type_ = cast("type[Any]", type(value))
    if type_ is int or type_ is float:
        scalars.append(value)
    elif type_ is complex:
        scalars += (value.real, value.imag)


def _walk_other_operand(value: Any, key: list[Any], scalars: list[Any]) -> None:
    """An operand that is not a tensor of the device: None, a number, or a 0-dim tensor of the host."""
    if not isinstance(value, torch.Tensor):
        _walk_number(value, key, scalars)
        return
    if value.device.type == "cpu" and value.dim() == 0:
        key.append(value.dtype)
        _walk_number(value.item(), key, scalars)
        return
    raise MixedDevices(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"moai:0 and {value.device}! Move the tensor of shape {list(value.shape)} with .to('moai')."
    )


def form_of(
    signature: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any], results: Iterable[Geometry]
) -> CallForm:
    """The form of a call whose new results have these geometries. Raises TypeError for what cannot be sent."""
    named = {name: _sent(value) for name, value in kwargs.items() if signature.by_name[name] is not ArgKind.PLACEMENT}
    outputs = [storage_geometry(result.name, result.shape, result.strides) for result in results]
    return take_apart(signature.name, [_sent(value) for value in args], named, outputs).form


def _sent(value: Any) -> Any:
    """The argument as the accelerator takes it."""
    if isinstance(value, torch.Tensor):
        return view_of(value) if is_ours(value) else value.detach()
    if isinstance(value, list | tuple):
        return [_sent(item) for item in cast("list[Any]", value)]
    return value
