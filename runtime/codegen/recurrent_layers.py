"""Recurrent layers, `moai.recurrent` and its backward: whole stacks of LSTM, GRU or plain layers in one op.

PyTorch composes such a layer of some ten ops for each time step, where the device has no kernel for it. Here a worker
calls PyTorch's layer, which picks the kernel of the worker's device: oneDNN's, cuDNN's, or ops of its own.

    %out, %h, %c, %record = moai.recurrent(%x, [%h0, %c0], [%w_ih, %w_hh, …], "lstm", [], true, 1, false, 36)
    %dx, %dw, … = moai.recurrent_backward(%record, [%dout, _, _], %x, [%h0, %c0], [%w_ih, %w_hh, …], …)

The record is a tensor to which the worker's own autograd graph of the layer is attached. It is as large as what that
graph holds, so that plans count it, but takes addresses only. Backward differentiates the graph; the layer is run again
without a record, with one that has lost its graph as it was copied, where the memory of an operand has been reused, and
on GPUs, whose kernels may be replayed without this code.
"""

from __future__ import annotations

import importlib
import mmap
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from moaic.ir.graph import Op
from moaic.ir.recurrent import flops as recurrent_flops
from moaic.ir.recurrent import products_in_backward
from moaic.runtime.codegen.narrow_on_cpu import lacking

_FORM: Final = "str mode, int[] batch_sizes, bool has_biases, int num_layers, bool bidirectional"
"""What is not a tensor. `batch_sizes` are those of a packed sequence; a padded one, `[time, batch, …]`, has none.

Forward is also told the size of the record, `saved` values for each row and time step, or 0 for none: what is compiled
for one size is not taken for another.
"""

_SCHEMAS: Final = (
    f"recurrent(Tensor x, Tensor[] states, Tensor[] params, {_FORM}, int saved) -> Tensor[]",
    "recurrent_backward(Tensor? record, Tensor?[] grads, Tensor x, Tensor[] states, Tensor[] params, "
    f"{_FORM}, bool[] wanted) -> Tensor[]",
)

_GRAPH: Final = "recorded"
"""The attribute of a record."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    """Operands and results of a layer that autograd has recorded."""

    operands: list[Tensor]
    results: tuple[Tensor, ...]

    def is_of(self, operands: Sequence[Tensor]) -> bool:
        """Whether these are the operands: the memory of parameters may have been reused, too, if they were gathered."""
        return all(map(_are_equal, self.operands, operands))


def _forward(x: Tensor, states: list[Tensor], params: list[Tensor], *form: Any) -> list[Tensor]:
    """Output and last states, and the record if it is wanted."""
    *layer, saved = form
    if not saved or x.device.type != "cpu":
        results = [result.contiguous() for result in _run([x, *states, *params], len(states), *layer)]
        return [*results, *_like_record(x, saved)]
    graph = _record([x, *states, *params], len(states), *layer)
    record = _without_memory(x, (*x.shape[:-1], saved))
    setattr(record, _GRAPH, graph)
    # Copies, as programs may write to results in place: the graph needs the values that it has computed.
    return [*(result.detach().clone() for result in graph.results), record]


def _like_forward(x: Tensor, states: list[Tensor], params: list[Tensor], *form: Any) -> list[Tensor]:
    *_, bidirectional, saved = form
    width = states[0].shape[-1] * (1 + bidirectional)
    results = [x.new_empty((*x.shape[:-1], width)), *(state.new_empty(state.shape) for state in states)]
    return [*results, *_like_record(x, saved)]


def _like_record(x: Tensor, saved: int) -> list[Tensor]:
    return [x.new_empty((*x.shape[:-1], saved))] if saved else []


def _without_memory(x: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor of zeros that takes memory only where it is written, with the element type of `x`."""
    nbytes = prod(shape) * x.element_size()
    if not nbytes:
        return x.new_empty(shape)
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=x.dtype).resize_(shape)


def _backward(
    record: Tensor | None,
    grads: Sequence[Tensor | None],
    x: Tensor,
    states: list[Tensor],
    params: list[Tensor],
    *form: Any,
) -> list[Tensor]:
    """The gradients of the operands for which `wanted`, the last argument, holds."""
    *layer, wanted = form
    given = [x, *states, *params]
    graph: _Recorded | None = getattr(record, _GRAPH, None)
    if graph is None or not graph.is_of(given):
        graph = _record(given, len(states), *layer)
    known = [(result, grad) for result, grad in zip(graph.results, grads, strict=True) if grad is not None]
    operands = [operand for operand, is_wanted in zip(graph.operands, wanted, strict=True) if is_wanted]
    found = torch.autograd.grad(
        [result for result, _ in known],
        operands,
        [grad for _, grad in known],
        retain_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )
    return [grad.contiguous() for grad in found]


def _like_backward(record: Tensor | None, grads: Any, x: Tensor, states: list[Tensor], *rest: Any) -> list[Tensor]:
    params, *_, wanted = rest
    pairs = zip((x, *states, *params), wanted, strict=True)
    return [each.new_empty(each.shape) for each, is_wanted in pairs if is_wanted]


def _record(operands: Sequence[Tensor], states: int, *layer: Any) -> _Recorded:
    with torch.inference_mode(mode=False), torch.enable_grad(), _autograd_reached():
        # Input and states most often lie in memory that the program reuses at once, parameters do not.
        given, params = operands[: 1 + states], operands[1 + states :]
        leaves = [*(each.detach().clone().requires_grad_() for each in given), *map(_leaf, params)]
        return _Recorded(leaves, _run(leaves, states, *layer))


def _autograd_reached() -> AbstractContextManager[None]:
    """Ops reach autograd, which the dispatcher has behind it when a dispatch mode calls the kernel of an op."""
    core: Any = importlib.import_module("torch._C")
    kinds = (core.DispatchKey.AutogradCPU, core.DispatchKey.ADInplaceOrView)
    skipped: Any = core._dispatch_tls_local_exclude_set()
    for kind in kinds:
        skipped -= core.DispatchKeySet(kind)
    return core._ForceDispatchKeyGuard(core._dispatch_tls_local_include_set(), skipped)


def _leaf(operand: Tensor) -> Tensor:
    """A tensor of the same memory that autograd differentiates for; a copy where that is not allowed."""
    return (operand.clone() if operand.is_inference() else operand.data).requires_grad_()


def _are_equal(one: Tensor, other: Tensor) -> bool:
    is_same_memory = one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
    return is_same_memory or torch.equal(one, other)


def _run(operands: Sequence[Tensor], states: int, *layer: Any) -> tuple[Tensor, ...]:
    dtype, device = operands[0].dtype, operands[0].device
    if device.type == "cpu" and dtype in lacking():
        return tuple(result.to(dtype) for result in _call([operand.float() for operand in operands], states, *layer))
    return _call(operands, states, *layer)


def _call(
    operands: Sequence[Tensor],
    states: int,
    mode: str,
    batch_sizes: Sequence[int],
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
) -> tuple[Tensor, ...]:
    """PyTorch's layer. It trains wherever it is recorded: cuDNN differentiates nothing else; there is no dropout."""
    layer: Any = getattr(torch, mode)
    started = list(operands[1 : 1 + states])
    rest = (list(operands[1 + states :]), has_biases, num_layers, 0.0, torch.is_grad_enabled(), bidirectional)
    hidden = started if mode == "lstm" else started[0]
    with warnings.catch_warnings():
        # Of kernels that are not there, and of parameters that do not lie side by side.
        warnings.simplefilter("ignore")
        if batch_sizes:
            return layer(operands[0], torch.tensor(batch_sizes), hidden, *rest)
        return layer(operands[0], hidden, *rest, False)


def _define() -> Any:
    library: Any = torch.library.Library("moai", "FRAGMENT")
    kernels = ((_forward, _like_forward), (_backward, _like_backward))
    for schema, (kernel, like) in zip(_SCHEMAS, kernels, strict=True):
        name = schema.partition("(")[0]
        library.define(schema)
        library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"moai::{name}", like, lib=library)
    return library


_LIBRARY: Final = _define()
"""Keeps the two ops alive."""

FORWARD: Final[Any] = torch.ops.moai.recurrent.default
BACKWARD: Final[Any] = torch.ops.moai.recurrent_backward.default


def recurrent(op: Op, operands: Sequence[Any], device: torch.device) -> list[Tensor]:
    return FORWARD(*operands, **{"saved": 0, **op.attrs})


def recurrent_backward(op: Op, operands: Sequence[Any], device: torch.device) -> list[Tensor]:
    return BACKWARD(*operands, **op.attrs)


def flops(*args: Any) -> int:
    """Operations of either op, from the arguments of its call."""
    is_forward = not isinstance(args[2], Tensor)
    x, _, params = args[:3] if is_forward else args[2:5]
    products = 1 if is_forward else products_in_backward(is_recorded=args[0] is not None)
    return products * recurrent_flops(x.shape, [param.shape for param in params])
