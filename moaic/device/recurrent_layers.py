"""Recurrent layers as one op forward and one backward: see `runtime/codegen/recurrent_layers.py`.

A stack with dropout runs layer by layer, with the device's own dropout between. What the ops do not support
(`torch.func`, second derivatives, operands that do not fit) is composed by PyTorch of ops for each time step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import torch
from torch import Tensor

from moaic.device import torch_private
from moaic.device.handles import geometry, is_ours, new_tensor, view_of
from moaic.ir.op_names import RECURRENT, RECURRENT_BACKWARD
from moaic.ir.recurrent import MODES, values_saved
from moaic.runtime.codegen.recurrent_layers import BACKWARD, FORWARD
from moaic.runtime.controller import session
from moaic.runtime.controller.buffer import row_major

aten: Final[Any] = torch.ops.aten

_GATES: Final = {"lstm": 4, "gru": 3}


@dataclass(frozen=True, slots=True)
class _Stack:
    """What is not a tensor in a call of recurrent layers."""

    mode: str
    batch_sizes: tuple[int, ...]
    """Of a packed sequence; empty for a padded one, `[time, batch, features]`."""
    has_biases: bool
    num_layers: int
    bidirectional: bool

    @property
    def directions(self) -> int:
        return 1 + self.bidirectional

    @property
    def count_of_states(self) -> int:
        return 1 + (self.mode == "lstm")

    @property
    def form(self) -> tuple[Any, ...]:
        return self.mode, list(self.batch_sizes), self.has_biases, self.num_layers, self.bidirectional

    def split(self, tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Input, states and parameters."""
        begin = 1 + self.count_of_states
        return tensors[0], list(tensors[1:begin]), list(tensors[begin:])

    def values_recorded(self, params: Sequence[Tensor]) -> int:
        """How many values a record holds for each row and time step: what autograd saves, input and output."""
        of_input, of_state = (param.shape[1] for param in params[:2])
        return values_saved(self.mode, [param.shape for param in params]) + of_input + self.directions * of_state

    def composed(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The layers as PyTorch composes them of other ops."""
        x, states, params = self.split(tensors)
        packet, hidden = getattr(aten, self.mode), states if self.mode == "lstm" else states[0]
        rest = (params, self.has_biases, self.num_layers, 0.0, False, self.bidirectional)
        if self.batch_sizes:
            return torch_private.composite_kernel(packet.data)(x, torch.tensor(self.batch_sizes), hidden, *rest)
        return torch_private.composite_kernel(packet.input)(x, hidden, *rest, False)


class _Layers(torch.autograd.Function):
    """Recurrent layers that autograd records."""

    @staticmethod
    def forward(ctx: Any, stack: _Stack, *tensors: Tensor) -> tuple[Tensor, ...]:
        results, record = _launch(stack, tensors, is_recorded=True)
        ctx.stack = stack
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(record, *tensors)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        record, *tensors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:]
        if all(grad is None for grad in grads):
            return (None,) * (1 + len(wanted))
        is_composed = torch.is_grad_enabled() or _are_apart(tensors[0], grads)
        differentiate = _differentiate_composed if is_composed else _launch_backward
        found = differentiate(ctx.stack, record, tensors, grads, wanted)
        return None, *(next(found) if is_wanted else None for is_wanted in wanted)


def _are_apart(x: Tensor, grads: Sequence[Tensor | None]) -> bool:
    """Whether backward is run by something that is to see the ops of the layers."""
    if torch_private.is_transforming() or torch_private.is_intercepted() != torch_private.is_traced(x):
        return True
    return any(grad is not None and torch_private.is_of_many(grad) for grad in grads)


def _launch(stack: _Stack, tensors: Sequence[Tensor], *, is_recorded: bool) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Output and last states, and the record if it is asked for."""
    x, states, params = stack.split(tensors)
    saved = stack.values_recorded(params) if is_recorded else 0
    if torch_private.is_traced(x):
        results: list[Tensor] = FORWARD(x, states, params, *stack.form, saved)
    else:
        out = (*x.shape[:-1], stack.directions * states[0].shape[-1])
        shapes: list[Sequence[int]] = [out, *(state.shape for state in states)]
        if is_recorded:
            shapes.append((*x.shape[:-1], saved))
        results = [_new(x.dtype, shape) for shape in shapes]
        _send(RECURRENT, (x, states, params, *stack.form, saved), results)
    return tuple(results[: 1 + len(states)]), results[-1] if is_recorded else None


def _new(dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    return new_tensor(geometry(dtype, shape, row_major(shape)))


def _launch_backward(
    stack: _Stack,
    record: Tensor | None,
    tensors: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> Iterator[Tensor]:
    x, states, params = stack.split(tensors)
    if torch_private.is_traced(x):
        return iter(BACKWARD(record, grads, x, states, params, *stack.form, wanted))
    results = [_new(each.dtype, each.shape) for each, is_wanted in zip(tensors, wanted, strict=True) if is_wanted]
    _send(RECURRENT_BACKWARD, (record, list(grads), x, states, params, *stack.form, list(wanted)), results)
    return iter(results)


def _send(op: str, args: Sequence[Any], results: Sequence[Tensor]) -> None:
    buffers = [view_of(result).buffer for result in results]
    session.accelerator().launch(op, [_sent(arg) for arg in args], {}, buffers)


def _sent(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return view_of(arg)
    return [_sent(each) for each in arg] if isinstance(arg, list) else arg  # pyright: ignore[reportUnknownVariableType]


def _differentiate_composed(
    stack: _Stack,
    _: Tensor | None,
    tensors: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> Iterator[Tensor]:
    """Gradients that can be differentiated again, or of several gradients of the results at once."""
    is_recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        # One tensor may stand for several operands, and each has a gradient of its own.
        aliases = [tensor.view_as(tensor) for tensor in tensors]
        results = stack.composed(aliases)
    given = [(result, grad) for result, grad in zip(results, grads, strict=True) if grad is not None]
    found = torch.autograd.grad(
        [result for result, _ in given],
        [alias for alias, is_wanted in zip(aliases, wanted, strict=True) if is_wanted],
        [grad for _, grad in given],
        create_graph=is_recorded,
        allow_unused=True,
        materialize_grads=True,
    )
    return iter(found)


def _run(stack: _Stack, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return cast("tuple[Tensor, ...]", _Layers.apply(stack, *tensors))
    return _launch(stack, tensors, is_recorded=False)[0]


def _run_with_dropout(stack: _Stack, tensors: Sequence[Tensor], dropout: float) -> tuple[Tensor, ...]:
    """Layer by layer, with dropout before each but the first."""
    x, states, params = stack.split(tensors)
    one, directions, share = replace(stack, num_layers=1), stack.directions, len(params) // stack.num_layers
    last: list[tuple[Tensor, ...]] = []
    for index in range(stack.num_layers):
        begun = [state.narrow(0, index * directions, directions) for state in states]
        x = torch.dropout(x, dropout, train=True) if index else x
        x, *ended = _run(one, (x, *begun, *params[index * share : (index + 1) * share]))
        last.append(tuple(ended))
    return x, *(torch.cat(ends) for ends in zip(*last, strict=True))


def _fits(stack: _Stack, tensors: Sequence[Tensor]) -> bool:
    """Whether the ops accept operands of these shapes."""
    if len(tensors) <= stack.count_of_states or stack.num_layers < 1:
        return False
    x, states, params = stack.split(tensors)
    sizes = stack.batch_sizes
    if x.dim() != (2 if sizes else 3) or (sizes and (sum(sizes) != len(x) or list(sizes) != sorted(sizes)[::-1])):
        return False
    if not x.shape[0] or any(not param.numel() for param in params):
        return False
    begin = (stack.num_layers * stack.directions, sizes[0] if sizes else x.shape[1])
    if any(state.dim() != len(begin) + 1 or state.shape[:-1] != begin for state in states):
        return False
    return [tuple(param.shape) for param in params] == list(_shapes(stack, x.shape[-1], states))


def _shapes(stack: _Stack, features: int, states: Sequence[Tensor]) -> Iterator[tuple[int, ...]]:
    """The shapes of the parameters, layer by layer and direction by direction."""
    out, hidden = states[0].shape[-1], states[-1].shape[-1]
    rows = _GATES.get(stack.mode, 1) * hidden
    for index in range(stack.num_layers * stack.directions):
        yield rows, features if index < stack.directions else stack.directions * out
        yield rows, out
        yield from [(rows,)] * (2 * stack.has_biases)
        if out != hidden:  # projections
            yield out, hidden


def _at_once(
    mode: str,
    tensors: Sequence[Tensor],
    batch_sizes: Tensor | None,
    dropout: float,
    *form: Any,
) -> tuple[Tensor, ...] | None:
    """The layers by the ops; None where these do not accept the operands, and PyTorch is left to compose or refuse."""
    if torch_private.is_transforming():
        return None
    # A compiler that traces the device's ops gets the layers as one op, any other mode the ops within.
    is_traced = torch_private.is_traced(tensors[0])
    if is_traced != torch_private.is_intercepted() or (is_traced and batch_sizes is not None):
        return None
    dtype = tensors[0].dtype
    are_alike = all(is_ours(each) and each.dtype == dtype for each in tensors)
    if not dtype.is_floating_point or not are_alike:
        return None
    stack = _Stack(mode, () if batch_sizes is None else tuple(cast("list[int]", batch_sizes.tolist())), *form)
    if not _fits(stack, tensors):
        return None
    run_with_dropout = dropout and stack.num_layers > 1
    return _run_with_dropout(stack, tensors, dropout) if run_with_dropout else _run(stack, tensors)


def _of_padded(mode: str) -> Callable[..., tuple[Tensor, ...]]:
    """`torch.lstm` and its like, of sequences that are padded to one length."""
    compose = torch_private.composite_kernel(getattr(aten, mode).input)

    def run(x: Tensor, states: Any, params: Sequence[Tensor], *rest: Any) -> tuple[Tensor, ...]:
        has_biases, num_layers, dropout, train, bidirectional, batch_first = rest
        by_time = x.transpose(0, 1) if batch_first and x.dim() > 1 else x
        tensors = (by_time, *_listed(states), *params)
        found = _at_once(mode, tensors, None, dropout * train, has_biases, num_layers, bidirectional)
        if found is None:
            return compose(x, states, params, *rest)
        out, *last = found
        return (out.transpose(0, 1) if batch_first else out), *last

    return run


def _of_packed(mode: str) -> Callable[..., tuple[Tensor, ...]]:
    """`torch.lstm` and its like, of packed sequences."""
    compose = torch_private.composite_kernel(getattr(aten, mode).data)

    def run(x: Tensor, sizes: Tensor, states: Any, params: Sequence[Tensor], *rest: Any) -> tuple[Tensor, ...]:
        has_biases, num_layers, dropout, train, bidirectional = rest
        tensors = (x, *_listed(states), *params)
        found = _at_once(mode, tensors, sizes, dropout * train, has_biases, num_layers, bidirectional)
        return compose(x, sizes, states, params, *rest) if found is None else found

    return run


def _listed(states: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return [states] if isinstance(states, Tensor) else states


def install() -> None:
    """Dispatch torch's recurrent layers on the device to the two ops."""
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        registry = torch_private.Registry("aten", key)
        for mode in MODES:
            registry.add(f"aten::{mode}.input", _of_padded(mode))
            registry.add(f"aten::{mode}.data", _of_packed(mode))
