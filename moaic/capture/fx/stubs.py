"""The two graphs that AOTAutograd takes in place of a partition: it reads their inputs and outputs, runs neither.

A partition would hand saved tensors from the forward to the backward. The stubs hand over one call token, whose storage
refers to the call that the backward belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from moaic.capture.fx.traced_graph import TracedGraph


def forward_stub(traced: TracedGraph) -> fx.GraphModule:
    """Arguments in; outputs and one call token out, which is all that is saved for the backward."""
    graph = fx.Graph()
    copies = {node: _copied(graph, node) for node in traced.primals}
    outputs = [_stand_in(graph, node, copies) for node in traced.returned[: traced.forward_outputs]]
    token = graph.call_function(_never_run)
    token.meta["val"] = example_token()
    _output(graph, [*outputs, token], traced.descriptions[: traced.forward_outputs])
    return fx.GraphModule(traced.graph, graph)


def backward_stub(traced: TracedGraph) -> fx.GraphModule:
    """The call token and tangents in; gradients out."""
    graph = fx.Graph()
    token = graph.placeholder("call_token")
    token.meta["val"] = example_token()
    copies = {node: _copied(graph, node) for node in traced.tangents}
    grads = [_stand_in(graph, node, copies) for node in traced.returned[traced.forward_outputs :]]
    _output(graph, grads, traced.descriptions[traced.forward_outputs :])
    return fx.GraphModule(traced.graph, graph)


def example_token() -> Tensor:
    """A call token of no call; the element gives it a storage of its own."""
    return torch.zeros(1, dtype=torch.int64)


def _copied(graph: fx.Graph, node: fx.Node) -> fx.Node:
    copy = graph.placeholder(str(node.target))
    copy.meta = dict(node.meta)
    return copy


def _stand_in(graph: fx.Graph, node: Any, copies: dict[fx.Node, fx.Node]) -> Any:
    if not isinstance(node, fx.Node):
        return node
    if node not in copies:
        copies[node] = graph.call_function(_never_run)
        copies[node].meta = dict(node.meta)
    return copies[node]


def _never_run() -> None:
    raise AssertionError("this graph only describes what goes in and out")


def _output(graph: fx.Graph, returned: list[Any], descriptions: Sequence[Any]) -> None:
    node = graph.output(tuple(returned))
    node.meta["desc"] = [*descriptions, *([None] * (len(returned) - len(descriptions)))]
