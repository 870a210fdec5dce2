"""Recurrent layers, `moai.recurrent` and its backward: whole stacks of LSTM, GRU or plain layers in one op.

PyTorch composes such a layer of some ten ops for each time step, where the device has no kernel for it. Here a worker
calls PyTorch's layer, which picks the kernel of the worker's device: oneDNN's, cuDNN's, or ops of its own.

    %out, %h, %c, %record = moai.recurrent(%x, [%h0, %c0], [%w_ih, %w_hh, …], "lstm", [], true, 1, false, true)
    %dx, %dw, … = moai.recurrent_backward(%record, [%dout, _, _], %x, [%h0, %c0], [%w_ih, %w_hh, …], …)

The record is an empty tensor to which the worker's own autograd graph of the layer is attached. Backward differentiates
that graph; a record that was moved has lost it, and the layer is run again.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from moaic.runtime.codegen.narrow_on_cpu import lacking

MODES: Final = ("lstm", "gru", "rnn_tanh", "rnn_relu")
"""PyTorch's names of the layers."""

_FORM: Final = "str mode, int[] batch_sizes, bool has_biases, int num_layers, bool bidirectional"
"""What is not a tensor. `batch_sizes` are those of a packed sequence; a padded one, `[time, batch, …]`, has none."""

_SCHEMAS: Final = (
    f"recurrent(Tensor x, Tensor[] states, Tensor[] params, {_FORM}, bool is_recorded) -> Tensor[]",
    "recurrent_backward(Tensor record, Tensor?[] grads, Tensor x, Tensor[] states, Tensor[] params, "
    f"{_FORM}, bool[] wanted) -> Tensor[]",
)

_GRAPH: Final = "recorded"
"""The attribute of a record."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    """Operands and results of a layer that autograd has recorded."""

    operands: list[Tensor]
    results: tuple[Tensor, ...]


def _forward(x: Tensor, states: list[Tensor], params: list[Tensor], *form: Any) -> list[Tensor]:
    """Output and last states, and the record if it is wanted."""
    *layer, is_recorded = form
    if not is_recorded:
        return list(_run([x, *states, *params], len(states), *layer))
    graph = _record([x, *states, *params], len(states), *layer)
    record = x.new_empty(1)
    setattr(record, _GRAPH, graph)
    # Copies, as programs may write to results in place: the graph needs the values that it has computed.
    return [*(result.detach().clone() for result in graph.results), record]


def _backward(
    record: Tensor,
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
    return list(found)


def _record(operands: Sequence[Tensor], states: int, *layer: Any) -> _Recorded:
    # As `.data`: the program's own autograd has checked by then that nothing was overwritten.
    leaves = [operand.data.requires_grad_() for operand in operands]
    with torch.enable_grad():
        return _Recorded(leaves, _run(leaves, states, *layer))


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
    """PyTorch's layer. It trains in any case: cuDNN differentiates nothing else, and only dropout would differ."""
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


@cache
def define() -> Any:
    """Define the two ops in this process; the library that is returned keeps them alive."""
    library: Any = torch.library.Library("moai", "FRAGMENT")
    for schema, kernel in zip(_SCHEMAS, (_forward, _backward), strict=True):
        library.define(schema)
        library.impl(schema.partition("(")[0], kernel, "CompositeExplicitAutograd")
    return library
