"""Second derivatives of a compiled graph, which there are none of: whatever they are taken to, it is an error.

PyTorch raises the error in the backward of a graph's backward, which runs only where it leads to what gradients are
asked of. It leads to the values that PyTorch saved of the forward, and of a graph of ours it has saved none (`aot`):
`torch.autograd.grad(loss + penalty, parameters)` would leave the penalty out without a word. Here the gradients that a
backward makes depend on all inputs of the forward, where it creates a graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any, Final, cast

import torch
from torch import Tensor

from moaic.device import torch_private
from moaic.support.traces import shorten

_VIEWS: Final = 8
"""Most views that an output of a graph is of what the graph computes."""


def depending_on_inputs(run: Callable[..., Any]) -> Callable[..., Any]:
    """The callable of a compiled graph, of which gradients that may be differentiated depend on all inputs."""

    @wraps(run)
    def call(*args: Any) -> Any:
        # Before the graph runs, which may write to inputs: they would depend on its own backward.
        anchor, first = _anchor(args), torch_private.next_sequence_number()
        try:
            outputs = run(*args)
        except Exception as error:
            shorten(error)
            raise
        if torch.is_grad_enabled() and (node := _backward_since(first, (*outputs, *args))) is not None:
            node.register_hook(_Dependence(node, anchor))
        return outputs

    return call


def _anchor(inputs: Iterable[Any]) -> Tensor | None:
    """An empty tensor that depends on the inputs that are computed, and keeps none of their values."""
    computed = [each for each in inputs if getattr(each, "grad_fn", None) is not None]
    return cast("Tensor", _Anchor.apply(*computed)) if computed else None


def _backward_since(first: int, results: Iterable[Any]) -> Any:
    """The node of the backward of the graph that made these; None where it made nothing that is differentiated.

    Its number is not below `first`: outputs may also be views of inputs, which another graph has made.
    """
    nodes = (node for result in results for node in _nodes_of_views(result))
    return next((node for node in nodes if torch_private.is_compiled_backward(node, first)), None)


def _nodes_of_views(output: Any) -> Iterator[Any]:
    node: Any = getattr(output, "grad_fn", None)
    for _ in range(_VIEWS):
        if node is None:
            return
        yield node
        node = node.next_functions[0][0] if node.next_functions else None


class _Dependence:
    """A hook after a graph's backward: the gradients that it made depend on the inputs of the forward."""

    def __init__(self, node: Any, anchor: Tensor | None) -> None:
        self._node = weakref.ref(node)
        self._others = [] if anchor is None else [anchor]

    def __call__(self, made: Sequence[Tensor | None], _: Sequence[Tensor | None]) -> tuple[Tensor | None, ...] | None:
        if not torch.is_grad_enabled():
            return None
        inputs = [*self._leaves(), *self._others]
        return tuple(None if each is None else cast("Tensor", _Dependent.apply(each, *inputs)) for each in made)

    def _leaves(self) -> Iterator[Tensor]:
        node = self._node()
        assert node is not None, "a node outlives its hooks"
        for before, _ in node.next_functions:
            if (leaf := getattr(before, "variable", None)) is not None:
                yield leaf


class _Anchor(torch.autograd.Function):
    """An empty tensor that depends on others."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("what depends on it has raised before")


class _Dependent(torch.autograd.Function):
    """A gradient that depends on other tensors, too, and has no derivative."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *inputs: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(torch_private.DIFFERENTIATED_TWICE)
