"""A captured training graph without a program: its ops run one by one, as in eager mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, fx
from torch._functorch.partitioners import default_partition

from moaic.capture.fx.traced_graph import TracedGraph
from moaic.capture.saved_tensors import Saved


class Kept(Saved):
    """The values that the forward of one call saved for its backward, by name."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(dict(enumerate(values)), list(values.values()))
        self.values = values


class EagerHalves:
    """A joint graph cut by PyTorch's default partitioner into a forward and a backward that reads saved values."""

    def __init__(self, traced: TracedGraph) -> None:
        self._outputs = traced.forward_outputs
        self._forward, self._backward = default_partition(traced.graph, (), num_fwd_outputs=self._outputs)
        self._kept = _names_returned(self._forward)[self._outputs :]
        self._read = [node.name for node in self._backward.graph.find_nodes(op="placeholder")]
        self._written = traced.written()

    def forward(self, args: Sequence[Any]) -> tuple[list[Any], Kept]:
        """Return the outputs and the saved values; arguments that are written later are copied."""
        made = list(self._forward(*args))
        written = [args[position] for position in self._written]
        values = [_kept(value, written) for value in made[self._outputs :]]
        return made[: self._outputs], Kept(dict(zip(self._kept, values, strict=True)))

    def backward(self, kept: Kept, tangents: Sequence[Any]) -> Sequence[Any]:
        given = iter(tangents)
        return self._backward(*[kept.values[name] if name in kept.values else next(given) for name in self._read])


def _kept(value: Any, written: Sequence[Tensor]) -> Any:
    """The value without its autograd graph: that graph owns the saved values, which must not own it."""
    if not isinstance(value, Tensor):
        return value
    return value.clone() if any(value is each for each in written) else value.detach()


def _names_returned(graph_module: fx.GraphModule) -> list[str]:
    returned = cast("Sequence[Any]", graph_module.graph.output_node().args[0])
    return [node.name if isinstance(node, fx.Node) else "" for node in returned]
