"""Calls of eager ops, each split into its form and the values that differ between calls of this form.

The controller decides the placements and defines the operation on the workers once per form and operand placements:

    x[0:4].mul_(0.9)   form: aten.mul_.Tensor, a view of shape (4,), a scalar; values: x, offset 0, 0.9
    x[4:8].mul_(0.8)   the same form; values: x, offset 4, 0.8
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple, cast

import torch

from moaic.runtime.controller.buffer import Buffer, StorageGeometry, View
from moaic.runtime.dtypes import DTYPE_NAMES
from moaic.runtime.protocol.combination import REDUCTIONS
from moaic.runtime.protocol.operation import ArgSpec, positions


class OperandForm(NamedTuple):
    """An operand without its buffer and the offset of a view."""

    storage: StorageGeometry
    dtype: torch.dtype
    view: tuple[tuple[int, ...], tuple[int, ...]] | None
    """Shape and strides; None if these and the offset are those of the buffer."""


@dataclass(frozen=True, slots=True, eq=False)
class CallForm:
    """An op and its arguments without buffers, offsets of views, and scalars. Made by `call_form`."""

    op: str
    args: tuple[ArgSpec, ...]
    kwargs: tuple[tuple[str, ArgSpec], ...]
    operands: tuple[OperandForm, ...]
    outputs: tuple[StorageGeometry, ...]
    positions: tuple[tuple[int, bool], ...]
    """Per operand: its index in a list of tensors (else -1), and whether the op writes it."""
    default_dtype: str
    """PyTorch's default dtype at the call: that of results for which the operands tell none."""


@lru_cache(1 << 14)
def call_form(
    op: str,
    args: tuple[ArgSpec, ...],
    kwargs: tuple[tuple[str, ArgSpec], ...],
    operands: tuple[OperandForm, ...],
    outputs: tuple[StorageGeometry, ...],
    default_dtype: str,
) -> CallForm:
    """The one object for all equal forms, so that caches of decisions compare forms by identity."""
    return CallForm(op, args, kwargs, operands, outputs, tuple(positions(op, args, kwargs)), default_dtype)


class EagerCall(NamedTuple):
    """A call of an op: its form, and its buffers, offsets and scalars in order."""

    form: CallForm
    buffers: list[Buffer]
    offsets: list[int]
    """In elements, one per operand whose form has a view."""
    scalars: list[Any]

    def written(self) -> list[Buffer]:
        """The buffers that the op writes."""
        pairs = zip(self.buffers, self.form.positions, strict=True)
        return [buffer for buffer, (_, is_written) in pairs if is_written]


def take_apart(
    op: str, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Iterable[StorageGeometry]
) -> EagerCall:
    """Split a call of an op on views into form and values. Raises TypeError for an argument that cannot be sent."""
    views: list[View] = []
    scalars: list[Any] = []
    parts = tuple([_part(arg, views, scalars) for arg in args])
    named = tuple([(name, _part(arg, views, scalars)) for name, arg in kwargs.items()]) if kwargs else ()
    if op in REDUCTIONS:
        # The placement depends on which dims are reduced, so scalars of reductions are part of the form.
        values = iter(scalars)
        parts = tuple([_literal(part, values) for part in parts])
        named = tuple([(name, _literal(part, values)) for name, part in named])
        scalars = []
    operands = tuple([_operand_form(view) for view in views])
    offsets = [view.offset for view, operand in zip(views, operands, strict=True) if operand.view is not None]
    form = call_form(op, parts, named, operands, tuple(outputs), DTYPE_NAMES[torch.get_default_dtype()])
    return EagerCall(form, [view.buffer for view in views], offsets, scalars)


def _operand_form(view: View) -> OperandForm:
    buffer, shape, strides, offset, dtype = view
    is_own = not offset and shape == buffer.shape and strides == buffer.strides
    return OperandForm(buffer.geometry, dtype, None if is_own else (shape, strides))


def _literal(part: ArgSpec, values: Iterator[Any]) -> ArgSpec:
    if part == SCALAR:
        return ("literal", next(values))
    return ("literal", tuple([next(values) for _ in range(part[1])])) if part[0] == "scalars" else part


VIEW: Final[ArgSpec] = ("view",)
SCALAR: Final[ArgSpec] = ("scalar",)
COMPLEX: Final[ArgSpec] = ("complex",)
NOTHING: Final[ArgSpec] = ("literal", None)
DROPPED: Final = (torch.device, torch.layout, torch.memory_format, torch.Generator)


def _part(arg: Any, views: list[View], scalars: list[Any]) -> ArgSpec:
    type_ = cast("type[Any]", type(arg))
    if type_ is View:
        views.append(arg)
        return VIEW
    if type_ is float or type_ is int:
        scalars.append(arg)
        return SCALAR
    if type_ is list or type_ is tuple or type_ is torch.Size:
        return _list_part(arg, views, scalars)
    if arg is None or isinstance(arg, DROPPED):
        return NOTHING
    if type_ is complex:
        scalars += (arg.real, arg.imag)
        return COMPLEX
    if type_ is bool or type_ is str:
        return ("literal", arg)
    if type_ is torch.dtype:
        return ("dtype", DTYPE_NAMES[arg])
    if isinstance(arg, torch.Tensor) and arg.dim() == 0 and arg.device.type == "cpu":
        return ("number", DTYPE_NAMES[arg.dtype], _part(arg.item(), views, scalars))
    raise TypeError(f"an argument of type {type_.__name__} cannot be sent to the workers")


def _list_part(items: Sequence[Any], views: list[View], scalars: list[Any]) -> ArgSpec:
    types: set[type[Any]] = {type(item) for item in items}
    if types == {View}:
        views.extend(items)
        return ("views", len(items))
    if types <= {int, float}:
        scalars.extend(items)
        return ("scalars", len(items))
    return ("list", tuple([_part(item, views, scalars) for item in items]))
