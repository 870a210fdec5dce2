"""One FX graph as AOTAutograd traced it: its inputs and outputs, and the role of each.

Nothing here depends on sizes; `program` fixes them and `reader` makes the ops.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import BackwardTokenAOTInput

from moaic.capture.provenance import role_of
from moaic.ir.graph import NO_ROLE, Role

WITH_EFFECTS: Final = torch.ops.higher_order.with_effects
"""The call around an op with effects: a token, the op, its arguments. Gives the next token and the op's results."""


@dataclass(frozen=True, slots=True)
class NameSupply:
    """Names that only Dynamo's graph knows: a role per input, a name per output."""

    inputs: tuple[Role, ...]
    outputs: tuple[str, ...]


def names_of(graph_module: fx.GraphModule, examples: Sequence[Any]) -> NameSupply:
    """Roles and names, read from the graph that Dynamo hands to its backend."""
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    inputs = [_dynamo_role(node, example) for node, example in zip(placeholders, examples, strict=True)]
    outputs = tuple(node.name if isinstance(node, fx.Node) else "" for node in _returned(graph_module))
    return NameSupply(_distinct(inputs), outputs)


def _dynamo_role(node: fx.Node, example: Any) -> Role:
    argument = node.meta.get("grapharg")
    source = getattr(getattr(argument, "source", None), "name", node.name)
    source = source() if callable(source) else source
    return role_of(str(source), isinstance(example, torch.nn.Parameter))


def _distinct(roles: list[Role]) -> tuple[Role, ...]:
    """Number equal roles: two models in one graph may both have a `weight`."""
    seen: dict[Role, int] = {}
    distinct: list[Role] = []
    for role in roles:
        seen[role] = seen.get(role, 0) + 1
        distinct.append(role if seen[role] == 1 else Role(role.kind, f"{role.label}.{seen[role]}"))
    return tuple(distinct)


def _returned(graph_module: fx.GraphModule) -> list[Any]:
    (returned,) = graph_module.graph.output_node().args
    return list(sequence(returned))


def sequence(returned: Any) -> Sequence[Any]:
    """`returned` as a sequence: an op with one result gives it alone."""
    return cast("Sequence[Any]", returned) if isinstance(returned, list | tuple) else (returned,)


class TracedGraph:
    """A joint graph, whose first `forward_outputs` outputs are the forward's, or the graph of an inference."""

    def __init__(self, graph_module: fx.GraphModule, forward_outputs: int, names: NameSupply) -> None:
        self.names = names
        self.graph = graph_module
        self.nodes = list(graph_module.graph.nodes)
        placeholders = [node for node in self.nodes if node.op == "placeholder"]
        self.primals = [node for node in placeholders if not _is_tangent(node)]
        self.tangents = [node for node in placeholders if _is_tangent(node)]
        self.returned = _returned(graph_module)
        self.descriptions = graph_module.graph.output_node().meta.get("desc") or [None] * len(self.returned)
        self.forward_outputs = forward_outputs
        self.tokens = frozenset(node.args[0] for node in self.nodes if node.target is WITH_EFFECTS)
        """Tokens that order ops with effects; they have no value."""
        self._roles = {
            node: self._placeholder_role(node, position)
            for nodes in (self.primals, self.tangents)
            for position, node in enumerate(nodes)
        }

    def examples(self) -> list[Any]:
        """The value that the tracer had for each argument of the forward: a fake tensor, a symbol or a number."""
        return [node.meta["val"] for node in self.primals]

    def attribute(self, name: str) -> Any:
        """A constant that a `get_attr` node names."""
        return operator.attrgetter(name)(self.graph)

    def role(self, placeholder: fx.Node) -> Role:
        return self._roles[placeholder]

    def output_role(self, description: Any, position: int) -> Role:
        """The role of an output: AOTAutograd's description names the input that it updates or is the gradient of."""
        mutated, grad_of = getattr(description, "mutated_input", None), getattr(description, "grad_of", None)
        if mutated is not None:
            return Role("update", self._input_role(mutated, position).label)
        if grad_of is not None:
            return Role("grad", self._input_role(grad_of, position).label)
        base = getattr(description, "base_of", description)
        index = getattr(base, "idx", position)
        names = self.names.outputs
        return Role("output", names[index] if index < len(names) else str(index))

    def read_by_backward(self) -> dict[int, str]:
        """The arguments that the backward reads, as they are or as a view, and their names.

        They are the tensors that autograd saves, because autograd traced the backward.
        """
        sources = {node: position for position, node in enumerate(self.primals)}
        backward, read = set(self.tangents), set[int]()
        for node in self.nodes:
            operands: list[fx.Node] = node.all_input_nodes if node.op == "call_function" else []
            if not backward.isdisjoint(operands):
                backward.add(node)
                read.update(sources[operand] for operand in operands if operand in sources)
            elif operands and operands[0] in sources and _keeps_memory(node.target):
                sources[node] = sources[operands[0]]
        return {position: self.role(self.primals[position]).label for position in sorted(read)}

    def written(self) -> list[int]:
        """The arguments that AOTAutograd overwrites with an update that the forward returns."""
        outputs = zip(self.descriptions, range(self.forward_outputs), strict=False)
        roles = [self.output_role(description, position) for description, position in outputs]
        labels = {role.label for role in roles if role.kind == "update"}
        return [position for position, node in enumerate(self.primals) if self.role(node).label in labels]

    def _placeholder_role(self, placeholder: fx.Node, position: int) -> Role:
        description = placeholder.meta.get("desc")
        if _is_tangent(placeholder):
            return Role("tangent", self.output_role(getattr(description, "output", None), position).label)
        return self._input_role(description, position)

    def _input_role(self, description: Any, position: int) -> Role:
        """The role that Dynamo's graph gives to an input; a description of a view leads to the input through bases."""
        inner = description
        while inner is not None and not hasattr(inner, "idx"):
            inner = getattr(inner, "base_of", None) or getattr(inner, "base", None)
        index = position if inner is None else inner.idx
        return self.names.inputs[index] if index < len(self.names.inputs) else NO_ROLE


def _keeps_memory(target: Any) -> bool:
    """Whether an op gives a view, or an item of a list of views."""
    return target is operator.getitem or getattr(target, "is_view", False)


def _is_tangent(node: fx.Node) -> bool:
    """Whether a placeholder is an argument of the backward: a tangent, or a token for its first op with effects."""
    description = node.meta.get("desc")
    if description is None:
        return "tangents" in str(node.target)
    return description.is_tangent() or isinstance(description, BackwardTokenAOTInput)
