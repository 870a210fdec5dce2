"""Recurrent layers, `moai.recurrent` and its backward: whole stacks of LSTM, GRU or plain layers in one op.

PyTorch composes such a layer of some ten ops for each time step, where the device has no kernel for it. Here a worker
calls PyTorch's layer, which picks the kernel of the worker's device: oneDNN's, cuDNN's, or ops of its own.

    %out, %h, %c, %record = moai.recurrent(%x, [%h0, %c0], [%w_ih, %w_hh, …], "lstm", [], true, 1, false, true)
    %dx, %dw, … = moai.recurrent_backward(%record, [%dout, _, _], %x, [%h0, %c0], [%w_ih, %w_hh, …], …)

The record is an empty tensor to which the worker's own autograd graph of the layer is attached. Backward differentiates
that graph; without a record, or with one that has lost its graph as it was moved, the layer is run again. Programs have
no records: these would tie the run of one compiled function to that of another.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from moaic.ir.graph import Op
from moaic.ir.recurrent import RUNS_IN_BACKWARD
from moaic.ir.recurrent import flops as recurrent_flops
from moaic.runtime.codegen.narrow_on_cpu import lacking

_FORM: Final = "str mode, int[] batch_sizes, bool has_biases, int num_layers, bool bidirectional"
"""What is not a tensor. `batch_sizes` are those of a packed sequence; a padded one, `[time, batch, …]`, has none."""

_SCHEMAS: Final = (
    f"recurrent(Tensor x, Tensor[] states, Tensor[] params, {_FORM}, bool is_recorded=False) -> Tensor[]",
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


def _forward(
    x: Tensor,
    states: list[Tensor],
    params: list[Tensor],
    mode: str,
    batch_sizes: Sequence[int],
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    is_recorded: bool = False,
) -> list[Tensor]:
    """Output and last states, and the record if it is wanted."""
    layer = (mode, batch_sizes, has_biases, num_layers, bidirectional)
    if not is_recorded:
        return [result.contiguous() for result in _run([x, *states, *params], len(states), *layer)]
    graph = _record([x, *states, *params], len(states), *layer)
    record = x.new_empty(1)
    setattr(record, _GRAPH, graph)
    # Copies, as programs may write to results in place: the graph needs the values that it has computed.
    return [*(result.detach().clone() for result in graph.results), record]


def _like_forward(x: Tensor, states: list[Tensor], params: list[Tensor], *form: Any) -> list[Tensor]:
    """Results of a layer that is not recorded."""
    *_, bidirectional = form
    width = states[0].shape[-1] * (1 + bidirectional)
    return [x.new_empty((*x.shape[:-1], width)), *(state.new_empty(state.shape) for state in states)]


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
    graph: _Recorded = getattr(record, _GRAPH, None) or _record([x, *states, *params], len(states), *layer)
    given = [(result, grad) for result, grad in zip(graph.results, grads, strict=True) if grad is not None]
    operands = [operand for operand, is_wanted in zip(graph.operands, wanted, strict=True) if is_wanted]
    found = torch.autograd.grad(
        [result for result, _ in given],
        operands,
        [grad for _, grad in given],
        retain_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )
    return [grad.contiguous() for grad in found]


def _like_backward(record: None, grads: Any, x: Tensor, states: list[Tensor], *rest: Any) -> list[Tensor]:
    params, *_, wanted = rest
    pairs = zip((x, *states, *params), wanted, strict=True)
    return [each.new_empty(each.shape) for each, is_wanted in pairs if is_wanted]


def _record(operands: Sequence[Tensor], states: int, *layer: Any) -> _Recorded:
    with torch.inference_mode(mode=False), torch.enable_grad(), _autograd_reached():
        leaves = [_leaf(operand) for operand in operands]
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
    """As by `.data`: the program's own autograd checks by itself that nothing is overwritten."""
    return (operand.clone() if operand.is_inference() else operand.data).requires_grad_()


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
    return FORWARD(*operands, **op.attrs)


def recurrent_backward(op: Op, operands: Sequence[Any], device: torch.device) -> list[Tensor]:
    return BACKWARD(*operands, **op.attrs)


def flops(*args: Any) -> int:
    """Operations of either op, from the arguments of its call."""
    is_forward = not isinstance(args[2], Tensor)
    x, _, params = args[:3] if is_forward else args[2:5]
    return recurrent_flops(x.shape, [param.shape for param in params]) * (1 if is_forward else RUNS_IN_BACKWARD)
