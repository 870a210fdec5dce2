"""The function of a graph that has been read, and the lists through which AOTAutograd sees its parameters and results.

Results of the IR share no memory, but the outputs of a graph may: each is described as views of a result or of an
argument, and these views are made again on the tensors of each call.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, cast

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils._mode_utils import no_dispatch

from moaic.capture.fx.captured import Captured, Slot
from moaic.capture.fx.reader import GraphReader
from moaic.capture.masks import with_flags
from moaic.capture.output_aliases import MemoryOrder, OutputAlias, OutputView, memory_order
from moaic.capture.value_checks import enforced
from moaic.ir.graph import Function, Role, Value
from moaic.ir.ops import check_known
from moaic.ir.symbols import Symbols
from moaic.passes.transforms.cse import common_subexpressions_merged
from moaic.passes.transforms.dce import live

aten = torch.ops.aten


def assembled(reader: GraphReader, symbols: Symbols) -> Captured:
    """The captured program: the ops that `reader` made, without those that no result needs."""
    traced = reader.traced
    results = _Results(reader)
    outputs = _ForwardOutputs(reader, results).slots()
    forward_results = len(results.values)
    grads = _grads(reader, results)
    params, param_roles = _params(reader)
    roles = tuple(results.roles)
    function = Function("step", params, tuple(reader.builder.ops), tuple(results.values), param_roles, roles)
    return Captured(
        _simplified(function, reader, symbols),
        _positions(reader, traced.primals),
        _positions(reader, traced.tangents),
        tuple(tensor for _, tensor in reader.constants),
        tuple(_param_of(role, param_roles) for role in roles[:forward_results] if role.kind == "update"),
        forward_results,
        tuple(results.on_host),
        tuple(results.memory_orders[:forward_results]),
        outputs,
        grads,
        reader.builder.draws > 0,
        symbols,
    )


def _simplified(function: Function, reader: GraphReader, symbols: Symbols) -> Function:
    with no_dispatch():
        function = with_flags(enforced(function), dict(reader.constants), symbols)
    function = common_subexpressions_merged(live(function))
    for op in function.ops:
        check_known(op)
    return function


def _params(reader: GraphReader) -> tuple[tuple[Value, ...], tuple[Role, ...]]:
    traced, key = reader.traced, reader.builder.key
    nodes = [node for node in (*traced.primals, *traced.tangents) if isinstance(reader.values[node], Value)]
    params: list[tuple[Value, Role]] = [(reader.values[node], traced.role(node)) for node in nodes]
    params += [(value, Role("constant", value.name)) for value, _ in reader.constants]
    params += [(key, Role("key"))] if reader.builder.draws else []
    return tuple(value for value, _ in params), tuple(role for _, role in params)


def _positions(reader: GraphReader, nodes: Sequence[fx.Node]) -> tuple[int, ...]:
    """Positions of the placeholders that are tensors."""
    return tuple(position for position, node in enumerate(nodes) if isinstance(reader.values[node], Value))


def _param_of(update: Role, params: Sequence[Role]) -> int:
    """The parameter that an update overwrites."""
    return next(index for index, role in enumerate(params) if role.label == update.label and role.kind != "tangent")


@dataclass(frozen=True, slots=True)
class _Results:
    """The results of the function so far, and what is known of each."""

    reader: GraphReader
    values: list[Value] = field(default_factory=list[Value])
    roles: list[Role] = field(default_factory=list[Role])
    memory_orders: list[MemoryOrder | None] = field(default_factory=list[MemoryOrder | None])
    on_host: list[bool] = field(default_factory=list[bool])

    def add(self, node: Any, role: Role, layout: MemoryOrder | None = None) -> int:
        """Append the value of a node, with its dims in the order of `layout`; returns its index."""
        builder, value = self.reader.builder, self.reader.values[node]
        self.values.append(builder.owned(value if layout is None else builder.permuted(value, layout.order)))
        self.roles.append(role)
        self.memory_orders.append(layout)
        self.on_host.append(node.meta["val"].device.type == "cpu")
        return len(self.values) - 1


def _grads(reader: GraphReader, results: _Results) -> tuple[Slot, ...]:
    traced = reader.traced
    returned, descriptions = (each[traced.forward_outputs :] for each in (traced.returned, traced.descriptions))
    slots: list[Slot] = []
    for position, (node, description) in enumerate(zip(returned, descriptions, strict=False)):
        value = reader.value(node)
        if isinstance(value, Value):
            role = traced.output_role(description, position)
            value = OutputView("result", results.add(node, role))
        slots.append(value)
    return tuple(slots)


class _ForwardOutputs:
    """The outputs of the forward, each as views of the result or the argument whose memory it shares."""

    def __init__(self, reader: GraphReader, results: _Results) -> None:
        traced = reader.traced
        self.reader = reader
        self.results = results
        self.returned = traced.returned[: traced.forward_outputs]
        described = zip(traced.descriptions, range(len(self.returned)), strict=False)
        self.roles = [traced.output_role(description, position) for description, position in described]
        self.roots = [_root(node) for node, role in self._outputs() if role.kind == "output"]
        self.shared: dict[fx.Node, int] = {}
        """The result in which several outputs lie, by the node that they are views of."""

    def slots(self) -> tuple[Slot, ...]:
        return tuple(self._slot(node, role) for node, role in self._outputs())

    def _outputs(self) -> list[tuple[Any, Role]]:
        return list(zip(self.returned, self.roles, strict=True))

    def _slot(self, node: Any, role: Role) -> Slot:
        value = self.reader.value(node)
        if not isinstance(value, Value):
            return value
        root, primals = _root(node), self.reader.traced.primals
        if role.kind == "update":
            return OutputView("result", self._result(node, role))
        if root in primals:
            return OutputView("argument", primals.index(root), self._views(node, root))
        if (argument := self._updated(node)) is not None:
            index, update = argument
            return OutputView("argument", index, self._views(node, update))
        is_shared = self.roots.count(root) > 1
        if is_shared or self._has_gaps(node):
            return OutputView("result", self._shared(root, role), self._views(node, root), known=is_shared)
        return OutputView("result", self._result(node, role))

    def _updated(self, node: Any) -> tuple[int, Any] | None:
        """The argument of whose new values `node` is a view, and the node that stands for these values."""
        traced = self.reader.traced
        updates = {_undetached(other): role.label for other, role in self._outputs() if role.kind == "update"}
        while _undetached(node) not in updates:
            call = _view_call(node)
            if call is None:
                return None
            node = call.args[0]
        label = updates[_undetached(node)]
        return next(index for index, primal in enumerate(traced.primals) if traced.role(primal).label == label), node

    def _shared(self, root: fx.Node, role: Role) -> int:
        if root not in self.shared:
            self.shared[root] = self._result(root, role)
        return self.shared[root]

    def _result(self, node: fx.Node, role: Role) -> int:
        return self.results.add(node, role, memory_order(*self._geometry(node)))

    def _geometry(self, node: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides, in elements."""
        tensor = node.meta["val"]
        shape, strides = (tuple(map(self.reader.concrete, each)) for each in (tensor.shape, tensor.stride()))
        return shape, strides

    def _has_gaps(self, node: fx.Node) -> bool:
        """Whether an output covers only a part of the memory in which it lies."""
        shape, _ = self._geometry(node)
        whole, _ = self._geometry(_root(node))
        return prod(shape) != prod(whole)

    def _views(self, node: fx.Node, start: fx.Node) -> tuple[OutputAlias, ...]:
        """The views that lead from `start` to `node`."""
        views: list[OutputAlias] = []
        while node is not start:
            call = _view_call(node)
            assert call is not None
            views.append(self._view(call, None if call is node else cast("int", node.args[1])))
            node = cast("fx.Node", call.args[0])
        return tuple(reversed(views))

    def _view(self, call: fx.Node, item: int | None) -> OutputAlias:
        arguments = tuple(map(self._plain, call.args[1:]))
        keywords = tuple((name, self._plain(given)) for name, given in call.kwargs.items())
        return OutputAlias(cast("OpOverload[..., Any]", call.target), arguments, keywords, item)

    def _plain(self, given: Any) -> Any:
        if isinstance(given, list | tuple):
            return tuple(map(self._plain, cast("Sequence[Any]", given)))
        return self.reader.value(given)


def _root(node: Any) -> Any:
    """The node whose memory `node` shares, through all views between."""
    while (call := _view_call(node)) is not None:
        node = call.args[0]
    return node


def _undetached(node: Any) -> Any:
    while isinstance(node, fx.Node) and node.target in (aten.detach.default, aten.alias.default):
        node = node.args[0]
    return node


def _view_call(node: Any) -> fx.Node | None:
    """The call of a view op whose result, or one of whose results, is `node`; None if it has its own memory."""
    call = node.args[0] if isinstance(node, fx.Node) and node.target is operator.getitem else node
    if not isinstance(call, fx.Node) or not isinstance(call.target, OpOverload):
        return None
    results: Any = cast("Any", call.target)._schema.returns
    shares = any(each.alias_info is not None and not each.alias_info.is_write for each in results)
    return call if shares else None
