"""FX graphs of AOTAutograd, read as the IR. The only file that imports FX to read it.

A graph is kept as FX while its sizes are symbols, and instantiated as a function of the IR for concrete sizes, once per
sizes. Strides, devices, copies and aliases end here: the IR has values only. What outputs share is kept beside it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, log1p, pi, prod
from typing import Any, Final, cast

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx
from torch._functorch._aot_autograd.descriptors import BackwardTokenAOTInput
from torch._ops import OpOverload
from torch.utils._mode_utils import no_dispatch

from moaic.capture.masks import with_flags
from moaic.capture.output_aliases import Laid, OutputAlias, Seen, laid
from moaic.capture.provenance import location, role_of
from moaic.capture.value_checks import in_force
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import NO_ROLE, Attr, Function, Location, Op, Operand, Role, Value
from moaic.ir.ops import CHECKED, SCALED_MM, check_known
from moaic.ir.types import FLOATING, TensorType
from moaic.passes.transforms.cse import once
from moaic.passes.transforms.dce import live
from moaic.runtime.dtypes import DTYPE_NAMES
from moaic.runtime.protocol.aten_schema import NAMESPACES, Signature, op_name, signature_of

aten = torch.ops.aten

TICKET_WORDS: Final = 1 + 16
"""The call's id, and the sizes that its symbols stood for."""

Slot = int | float | bool | None | Seen
"""One thing that AOTAutograd expects back: a tensor in memory of the call, a plain number, or nothing."""


@dataclass(frozen=True, eq=False)
class Captured:
    """A captured program for concrete sizes, and how its parameters and results meet AOTAutograd's lists."""

    function: Function
    """Parameters: those of the person's program in AOTAutograd's order, tangents, constants, the random key if any."""
    arguments: tuple[int, ...]
    """For each param, buffer and input, in order: its place in the list that the forward is called with."""
    tangents: tuple[int, ...]
    """For each tangent, in order: its place in the list of tangents that the backward is called with."""
    constants: tuple[Tensor, ...]
    """The value of each parameter with role constant, in order; on the CPU."""
    updates: tuple[int, ...]
    """For each result with role update, in order (they come first): the argument, counted as in `arguments`, that
    AOTAutograd overwrites with it once the forward has returned."""
    forward_results: int
    """How many of the function's results the forward gives (outputs and updates); the rest are gradients."""
    on_host: tuple[bool, ...]
    """For each result, gradients too: whether it is a tensor of the host."""
    laid: tuple[Laid | None, ...]
    """Of each result of the forward that is not row-major: how it lies in memory. The function's has dims in that
    order."""
    outputs: tuple[Slot, ...]
    """What the forward returns to AOTAutograd."""
    grads: tuple[Slot, ...]
    """What the backward returns to AOTAutograd: one slot per argument of the forward."""
    has_key: bool
    """Whether the last parameter is the random key."""

    @cached_property
    def is_training(self) -> bool:
        return bool(self.grads)


@dataclass(frozen=True, slots=True)
class NameSupply:
    """What Dynamo's graph says of its inputs and outputs: a role per input, a name per output."""

    inputs: tuple[Role, ...]
    outputs: tuple[str, ...]


def names_of(graph_module: fx.GraphModule, examples: Sequence[Any]) -> NameSupply:
    """Roles and names, read from the graph that Dynamo hands to its backend."""
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    inputs = [_input_role(node, example) for node, example in zip(placeholders, examples, strict=True)]
    (returned,) = graph_module.graph.output_node().args
    outputs = tuple(node.name if isinstance(node, fx.Node) else "" for node in _sequence(returned))
    return NameSupply(_distinct(inputs), outputs)


def _input_role(node: fx.Node, example: Any) -> Role:
    argument = node.meta.get("grapharg")
    source = getattr(getattr(argument, "source", None), "name", node.name)
    source = source() if callable(source) else source
    return role_of(str(source), isinstance(example, torch.nn.Parameter))


def _distinct(roles: list[Role]) -> tuple[Role, ...]:
    """Two models in one graph may both have a `weight`: the later one gets a number."""
    seen: dict[Role, int] = {}
    distinct: list[Role] = []
    for role in roles:
        seen[role] = seen.get(role, 0) + 1
        distinct.append(role if seen[role] == 1 else Role(role.kind, f"{role.label}.{seen[role]}"))
    return tuple(distinct)


class FxProgram:
    """A captured program with the sizes still open: a joint graph, or that of an inference.

    `sizes(args)` reads off the arguments of a call what the symbols are; a program without symbols has sizes ().
    """

    def __init__(self, graph_module: fx.GraphModule, forward_outputs: int, names: NameSupply) -> None:
        self.names = names
        self.graph = graph_module
        self._nodes = list(graph_module.graph.nodes)
        placeholders = [node for node in self._nodes if node.op == "placeholder"]
        self.primals = [node for node in placeholders if not _is_tangent(node)]
        self.tangents = [node for node in placeholders if _is_tangent(node)]
        (returned,) = graph_module.graph.output_node().args
        self.returned = list(_sequence(returned))
        self.descriptions = graph_module.graph.output_node().meta.get("desc") or [None] * len(self.returned)
        self.forward_outputs = forward_outputs
        self.tokens = frozenset(node.args[0] for node in self._nodes if node.target is _IN_ORDER)
        """What ops with effects wait for. It has no value."""
        self._roles = {
            node: self._role(node, at) for nodes in (self.primals, self.tangents) for at, node in enumerate(nodes)
        }
        self._bindings = _bindings(self.primals)
        assert len(self._bindings) < TICKET_WORDS, "too many symbols for a ticket"
        self._instances: dict[tuple[int, ...], Captured] = {}

    @property
    def is_training(self) -> bool:
        return len(self.returned) > self.forward_outputs

    @property
    def symbols(self) -> int:
        """How many sizes are open."""
        return len(self._bindings)

    def sizes(self, args: Sequence[Any]) -> tuple[int, ...]:
        """What each symbol stands for in a call of the forward with `args`."""
        return tuple(_read(binding, args) for binding in self._bindings.values())

    def instantiate(self, sizes: tuple[int, ...] = ()) -> Captured:
        """The program for concrete sizes, as `sizes(args)` gives them; made once."""
        if sizes not in self._instances:
            symbols = dict(zip(self._bindings, sizes, strict=True))
            self._instances[sizes] = _GraphReader(self, symbols).captured(self._nodes)
        return self._instances[sizes]

    def read_by_backward(self) -> dict[int, str]:
        """The arguments that the backward reads as they are, or as a view of them, and their names.

        They are what autograd saves: it was autograd that wrote the backward down.
        """
        sources = {node: at for at, node in enumerate(self.primals)}
        backward, read = set(self.tangents), set[int]()
        for node in self._nodes:
            operands: list[fx.Node] = node.all_input_nodes if node.op == "call_function" else []
            if not backward.isdisjoint(operands):
                backward.add(node)
                read.update(sources[each] for each in operands if each in sources)
            elif operands and operands[0] in sources and _keeps_memory(node.target):
                sources[node] = sources[operands[0]]
        return {at: self.role(self.primals[at]).label for at in sorted(read)}

    def written(self) -> list[int]:
        """The arguments whose new values the forward returns, to be written into them."""
        outputs = zip(self.descriptions, range(self.forward_outputs), strict=False)
        roles = [self.output_role(description, position) for description, position in outputs]
        labels = {role.label for role in roles if role.kind == "update"}
        return [at for at, node in enumerate(self.primals) if self.role(node).label in labels]

    def constant(self, name: str) -> Any:
        return operator.attrgetter(name)(self.graph)

    def role(self, placeholder: fx.Node) -> Role:
        return self._roles[placeholder]

    def _role(self, placeholder: fx.Node, position: int) -> Role:
        description = placeholder.meta.get("desc")
        if _is_tangent(placeholder):
            return Role("tangent", self.output_role(getattr(description, "output", None), position).label)
        return self._input_role(description, position)

    def _input_role(self, description: Any, position: int) -> Role:
        inner = description
        while inner is not None and not hasattr(inner, "idx"):
            inner = getattr(inner, "base_of", None) or getattr(inner, "base", None)
        index = position if inner is None else inner.idx
        return self.names.inputs[index] if index < len(self.names.inputs) else NO_ROLE

    def output_role(self, description: Any, position: int) -> Role:
        mutated, grad_of = getattr(description, "mutated_input", None), getattr(description, "grad_of", None)
        if mutated is not None:
            return Role("update", self._input_role(mutated, position).label)
        if grad_of is not None:
            return Role("grad", self._input_role(grad_of, position).label)
        base = getattr(description, "base_of", description)
        index = getattr(base, "idx", position)
        names = self.names.outputs
        return Role("output", names[index] if index < len(names) else str(index))


Binding = tuple[int, int | None]
"""Where a symbol is read: argument, and its dim where the argument is a tensor."""


def _bindings(primals: Sequence[fx.Node]) -> dict[Any, Binding]:
    bindings: dict[Any, Binding] = {}
    for position, node in enumerate(primals):
        value = node.meta["val"]
        if isinstance(value, SymInt):
            _bind(bindings, value, (position, None))
        elif isinstance(value, Tensor):
            for dim, size in enumerate(value.shape):
                _bind(bindings, size, (position, dim))
    return bindings


def _bind(bindings: dict[Any, Binding], size: Any, binding: Binding) -> None:
    if isinstance(size, SymInt) and size.node.expr.is_Symbol:
        bindings.setdefault(size.node.expr, binding)


def _read(binding: Binding, args: Sequence[Any]) -> int:
    position, dim = binding
    argument = args[position]
    return int(argument) if dim is None else int(argument.shape[dim])


def _keeps_memory(target: Any) -> bool:
    """Whether an op gives a view, or takes one out of a list of them."""
    return target is operator.getitem or getattr(target, "is_view", False)


def _is_tangent(node: fx.Node) -> bool:
    """Whether the backward is given it: a tangent, or a token for the first of its ops with effects."""
    description = node.meta.get("desc")
    if description is None:
        return "tangents" in str(node.target)
    return description.is_tangent() or isinstance(description, BackwardTokenAOTInput)


def _sequence(returned: Any) -> Sequence[Any]:
    return cast("Sequence[Any]", returned) if isinstance(returned, list | tuple) else (returned,)


class _GraphReader:
    """One pass over the nodes, for concrete sizes: what each node is in the IR, and the ops so far."""

    def __init__(self, program: FxProgram, symbols: Mapping[Any, int]) -> None:
        self.program = program
        self.symbols = symbols
        self.read: dict[fx.Node, Any] = {}
        self.ops: list[Op] = []
        self.producers: dict[Value, Op] = {}
        self.owned: set[Value] = set()
        self.constants: list[tuple[Value, Tensor]] = []
        self.key = Value(TensorType("i64", (2,)), "key")
        self.draws = 0
        self.loc = Location()

    def captured(self, nodes: Iterable[fx.Node]) -> Captured:
        for node in nodes:
            if node.op != "output":
                self.loc = location(node.meta)
                self.read[node] = self._node(node)
        return self._assemble()

    # From nodes to values.

    def _node(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self._placeholder(node)
        if node.op == "get_attr":
            return self._constant(self.program.constant(str(node.target)))
        if node.target is operator.getitem:
            container, index = node.args
            assert isinstance(container, fx.Node)
            return self.read[container][index]
        if node.target in _CHECKS:
            return self._check(node)
        value = node.meta.get("val")
        if isinstance(value, int | float | bool | SymInt | SymFloat | SymBool):
            return self.concrete(value)
        known = isinstance(node.target, OpOverload) and node.target.namespace in NAMESPACES
        if not known or "val" not in node.meta:
            raise _unsupported(node, self.loc)
        return self._call(node, cast("OpOverload[..., Any]", node.target))

    def _placeholder(self, node: fx.Node) -> Any:
        value = node.meta["val"]
        if node in self.program.tokens:
            return None
        if not isinstance(value, Tensor):
            return self.concrete(value)
        role = self.program.role(node)
        prefix = f"{role.kind}." if role.kind == "tangent" else ""
        return Value(self._type(value), prefix + role.label)

    def _check(self, node: fx.Node) -> tuple[None, ...]:
        """An assertion about all of a tensor, or about the codes that a routine gives beside its result.

        Of ops with effects each gets a token from the one before: here their order is that of the values.
        """
        effects = node.target is _IN_ORDER
        if effects and node.args[1] is not aten._linalg_check_errors.default:
            raise _unsupported(node, self.loc)
        asked, message = (*(node.args[2:4] if effects else node.args), UNSAID)[:2]
        said: Value = self.read[cast("fx.Node", asked)]
        value = self.producers[said].results[0] if effects else said
        self.emit(CHECKED, [value, said], value.type, message=str(message))
        return (None, None)

    def _constant(self, tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        with no_dispatch():  # a model without weights is captured among tensors without values
            tensor = tensor.detach().cpu()
            number = None if tensor.dim() else tensor.item()
        kind = TensorType(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
        if isinstance(number, complex):
            return self.complex_number(number, kind.dtype)
        if number is not None:
            return self.emit("aten.full", (), kind, size=(), fill_value=number, dtype=kind.dtype)
        value = Value(kind, f"constant{len(self.constants)}")
        self.constants.append((value, tensor))
        return value

    def _call(self, node: fx.Node, overload: OpOverload[..., Any]) -> Any:
        name = op_name(overload)
        called = signature_of(overload)
        operands, attrs = self._arguments(node, called)
        kinds = [self._type(value) for value in _sequence(node.meta["val"]) if isinstance(value, Tensor)]
        special = _SPECIAL.get(name)
        if special is not None:
            return special(_Call(self, node, name, operands, attrs, kinds))
        results = self.emit_many(name, operands, kinds, _normal(attrs, operands, kinds, called))
        if isinstance(node.meta["val"], Tensor):
            return results[0]
        rest = iter(results)
        return [next(rest) if isinstance(value, Tensor) else None for value in node.meta["val"]]

    def _arguments(self, node: fx.Node, called: Signature) -> tuple[list[Operand], dict[str, Attr]]:
        operands: list[Operand] = []
        attrs: dict[str, Attr] = {}
        positional = iter(node.args)
        for argument in called.arguments:
            given = (
                node.kwargs.get(argument.name, argument.default)
                if argument.keyword
                else _next(positional, node.kwargs.get(argument.name, argument.default))
            )
            value = self._argument(given)
            if argument.kind in ("tensor", "tensors"):
                if isinstance(value, complex):
                    value = self.complex_number(value, self._type(node.meta["val"]).dtype)
                operand, number = _as_operand(value)
                operands.append(operand)
                if number is not None:
                    attrs[argument.name] = number
            elif argument.kind != "placement" and (argument.required or value != self._argument(argument.default)):
                attrs[argument.name] = value
        return operands, attrs

    def complex_number(self, number: complex, dtype: str) -> Value:
        """A constant whose parts are literals."""
        real = TensorType("f64" if dtype == "c128" else "f32", ())
        parts = [
            self.emit("aten.full", (), real, size=(), fill_value=part, dtype=real.dtype)
            for part in (number.real, number.imag)
        ]
        return self.emit("aten.complex", parts, TensorType(dtype, ()))

    def _argument(self, given: Any) -> Any:
        if isinstance(given, fx.Node):
            return self.read[given]
        if isinstance(given, list | tuple):
            return tuple(self._argument(each) for each in cast("Sequence[Any]", given))
        if isinstance(given, torch.dtype):
            return DTYPE_NAMES[given]
        return self.concrete(given) if isinstance(given, SymInt | SymFloat | SymBool) else given

    def concrete(self, value: Any) -> Any:
        if not isinstance(value, SymInt | SymFloat | SymBool):
            return value
        found = cast("Any", value.node.expr.xreplace(self.symbols))
        if getattr(found, "free_symbols", None):
            raise Diagnostic(
                f"a size in this graph depends on values ({found}){_place(self.loc)}",
                hint="make the size a plain number, or keep this part out of the compiled model",
            )
        return (
            bool(found) if isinstance(value, SymBool) else float(found) if isinstance(value, SymFloat) else int(found)
        )

    def _type(self, tensor: Tensor) -> TensorType:
        if tensor.dtype not in DTYPE_NAMES:
            raise Diagnostic(
                f"a tensor of {tensor.dtype} is in the graph{_place(self.loc)}: this element type is unknown"
            )
        return TensorType(DTYPE_NAMES[tensor.dtype], tuple(self.concrete(size) for size in tensor.shape))

    # Making ops.

    def emit(self, name: str, operands: Sequence[Operand], kind: TensorType, **attrs: Attr) -> Value:
        """One op with one result."""
        return self.emit_many(name, operands, [kind], attrs)[0]

    def emit_many(
        self, name: str, operands: Sequence[Operand], kinds: Sequence[TensorType], attrs: Mapping[str, Attr]
    ) -> list[Value]:
        results = [Value(kind) for kind in kinds]
        op = Op(name, tuple(operands), tuple(results), dict(attrs), self.loc)
        self.ops.append(op)
        self.producers.update(dict.fromkeys(results, op))
        return results

    def behind(self, value: Value, name: str) -> tuple[Value, Mapping[str, Attr]] | None:
        """Operand and attributes of the op that made `value`, if it is a `name`."""
        op = self.producers.get(value)
        if op is None or op.name != name:
            return None
        (source,) = op.inputs()
        return source, op.attrs

    def rand(self, shape: tuple[int, ...]) -> Value:
        """Uniform numbers in [0, 1), f32, from a key of their own."""
        here = self.loc
        # The instance numbers the draws of the whole program, so the op belongs to no layer.
        self.loc = Location(here.file, here.line, "", here.side)
        key = self.emit("moai.fold_key", [self.key], self.key.type, instance=self.draws)
        self.loc = here
        self.draws += 1
        return self.emit("moai.rand", [key], TensorType("f32", shape))

    def in_order(self, value: Value, order: tuple[int, ...]) -> Value:
        if order == tuple(range(len(order))):
            return value
        kind = TensorType(value.type.dtype, tuple(value.type.shape[dim] for dim in order))
        return self.emit("aten.permute", [value], kind, dims=order)

    # Putting the function together.

    def _assemble(self) -> Captured:
        program = self.program
        forward, backward = (
            program.returned[: program.forward_outputs],
            program.returned[program.forward_outputs :],
        )
        results: list[Value] = []
        roles: list[Role] = []
        lies: list[Laid | None] = []
        on_host: list[bool] = []
        outputs = _Outputs(self, forward, results, roles, lies, on_host).slots()
        forward_results = len(results)
        grads = self._grads(backward, program.descriptions[program.forward_outputs :], results, roles)
        on_host += [_is_on_host(node) for node in backward if isinstance(self.value(node), Value)]
        params, param_roles = self._params()
        function = Function("step", params, tuple(self.ops), tuple(results), param_roles, tuple(roles))
        with no_dispatch():
            function = with_flags(in_force(function), dict(self.constants))
        function = once(live(function))
        for op in function.ops:
            check_known(op)
        return Captured(
            function,
            self._positions(program.primals),
            self._positions(program.tangents),
            tuple(tensor for _, tensor in self.constants),
            tuple(_place_of(role, param_roles) for role in roles[:forward_results] if role.kind == "update"),
            forward_results,
            tuple(on_host),
            tuple(lies),
            outputs,
            grads,
            self.draws > 0,
        )

    def _params(self) -> tuple[tuple[Value, ...], tuple[Role, ...]]:
        nodes = [node for node in (*self.program.primals, *self.program.tangents) if self._is_tensor(node)]
        params: list[tuple[Value, Role]] = [(self.read[node], self.program.role(node)) for node in nodes]
        params += [(value, Role("constant", value.name)) for value, _ in self.constants]
        params += [(self.key, Role("key"))] if self.draws else []
        return tuple(value for value, _ in params), tuple(role for _, role in params)

    def _is_tensor(self, node: fx.Node) -> bool:
        return isinstance(self.read[node], Value)

    def _positions(self, nodes: Sequence[fx.Node]) -> tuple[int, ...]:
        return tuple(position for position, node in enumerate(nodes) if self._is_tensor(node))

    def _grads(
        self, returned: Sequence[Any], descriptions: Sequence[Any], results: list[Value], roles: list[Role]
    ) -> tuple[Slot, ...]:
        slots: list[Slot] = []
        for position, (node, description) in enumerate(zip(returned, descriptions, strict=False)):
            value = self.value(node)
            if isinstance(value, Value):
                slots.append(Seen("result", len(results)))
                results.append(self.own(value))
                roles.append(self.program.output_role(description, position))
            else:
                slots.append(value)
        return tuple(slots)

    def value(self, returned: Any) -> Any:
        """What the graph returns: a value, a number or nothing."""
        return self.read[returned] if isinstance(returned, fx.Node) else self.concrete(returned)

    def own(self, value: Value) -> Value:
        """A result whose memory nobody else has: what it shares may be written in place once the program is over."""
        root = value
        while (op := self.producers.get(root)) is not None and op.name in _VIEWS:
            root = next(op.inputs())
        if root in self.producers and root not in self.owned:
            self.owned.add(root)
            return value
        made = self.producers.get(value)
        self.loc = Location() if made is None else made.loc
        return self.emit("aten.clone", [value], value.type)


class _Outputs:
    """The results that the forward's outputs lie in, and how each output is seen there."""

    def __init__(
        self,
        reader: _GraphReader,
        returned: Sequence[Any],
        results: list[Value],
        roles: list[Role],
        lies: list[Laid | None],
        on_host: list[bool],
    ) -> None:
        self.reader = reader
        self.returned = returned
        self.results = results
        self.roles = roles
        self.lies = lies
        self.on_host = on_host
        self.given = [_root(node) for node, role in zip(returned, self._roles(), strict=True) if role.kind == "output"]
        self.made: dict[fx.Node, int] = {}

    def slots(self) -> tuple[Slot, ...]:
        return tuple(self._slot(node, role) for node, role in zip(self.returned, self._roles(), strict=True))

    def _roles(self) -> list[Role]:
        program = self.reader.program
        described = zip(program.descriptions, range(len(self.returned)), strict=False)
        return [program.output_role(description, position) for description, position in described]

    def _slot(self, node: Any, role: Role) -> Slot:
        value = self.reader.value(node)
        if not isinstance(value, Value):
            return value
        root = _root(node)
        if role.kind == "update":
            return Seen("result", self._result(node, role))
        if root in self.reader.program.primals:
            return Seen("argument", self.reader.program.primals.index(root), self._views(node, root))
        if (found := self._updated(node)) is not None:
            argument, update = found
            return Seen("argument", argument, self._views(node, update))
        shared = self.given.count(root) > 1
        if shared or self._has_gaps(node):
            return Seen("result", self._shared(root, role), self._views(node, root), known=shared)
        return Seen("result", self._result(node, role))

    def _updated(self, node: Any) -> tuple[int, Any] | None:
        """The argument whose new values `node` is a view of, and the node that stands for these."""
        program = self.reader.program
        updates = {
            _undetached(each): role.label
            for each, role in zip(self.returned, self._roles(), strict=True)
            if role.kind == "update"
        }
        while _undetached(node) not in updates:
            call = _view_call(node)
            if call is None:
                return None
            node = call.args[0]
        label = updates[_undetached(node)]
        return next(at for at, each in enumerate(program.primals) if program.role(each).label == label), node

    def _shared(self, root: fx.Node, role: Role) -> int:
        if root not in self.made:
            self.made[root] = self._result(root, role)
        return self.made[root]

    def _result(self, node: fx.Node, role: Role) -> int:
        value, lies = self.reader.read[node], laid(*self._geometry(node))
        self.lies.append(lies)
        self.on_host.append(_is_on_host(node))
        self.results.append(self.reader.own(value if lies is None else self.reader.in_order(value, lies.order)))
        self.roles.append(role)
        return len(self.results) - 1

    def _geometry(self, node: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
        tensor = node.meta["val"]
        shape, strides = (tuple(map(self.reader.concrete, each)) for each in (tensor.shape, tensor.stride()))
        return shape, strides

    def _has_gaps(self, node: fx.Node) -> bool:
        """Whether an output is not all of the memory that it lies in."""
        shape, _ = self._geometry(node)
        whole, _ = self._geometry(_root(node))
        return prod(shape) != prod(whole)

    def _views(self, node: fx.Node, start: fx.Node) -> tuple[OutputAlias, ...]:
        """From `start` to `node`."""
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


def _is_on_host(node: fx.Node) -> bool:
    return node.meta["val"].device.type == "cpu"


def _root(node: Any) -> Any:
    """What a node is a view of, through all views between."""
    while (call := _view_call(node)) is not None:
        node = call.args[0]
    return node


def _undetached(node: Any) -> Any:
    while isinstance(node, fx.Node) and node.target in (aten.detach.default, aten.alias.default):
        node = node.args[0]
    return node


def _view_call(node: Any) -> fx.Node | None:
    """The call of an op that gives views which `node` is, or is one of several of; None if it has its own memory."""
    call = node.args[0] if isinstance(node, fx.Node) and node.target is operator.getitem else node
    if not isinstance(call, fx.Node) or not isinstance(call.target, OpOverload):
        return None
    results: Any = cast("Any", call.target)._schema.returns
    shares = any(each.alias_info is not None and not each.alias_info.is_write for each in results)
    return call if shares else None


_VIEWS: Final = frozenset(
    {
        "aten.view",
        "aten.permute",
        "aten.expand",
        "aten.slice.Tensor",
        "aten.select.int",
        "aten.split_with_sizes",
        "aten.view_as_complex",
        "aten.view_as_real",
    }
)
"""Ops whose results may lie in their operand's memory."""


def _place_of(update: Role, params: Sequence[Role]) -> int:
    return next(place for place, role in enumerate(params) if role.label == update.label and role.kind != "tangent")


_IN_ORDER: Final = torch.ops.higher_order.with_effects
"""What stands around an op that has effects: a token, the op, its arguments. Gives the next token and the results."""

_CHECKS: Final = frozenset({aten._assert_async.msg, aten._assert_async.default, _IN_ORDER})
"""Calls that give nothing, and raise."""

UNSAID: Final = "Expected Tensor with single nonzero value, but got zero"
"""What PyTorch says where an assertion has no words."""


def _next(positional: Any, default: Any) -> Any:
    return next(positional, default)


def _as_operand(value: Any) -> tuple[Operand, Attr]:
    """The operand, or the number that stands in its place."""
    if value is None or isinstance(value, Value):
        return value, None
    if isinstance(value, tuple):
        values = cast("tuple[Any, ...]", value)
        return tuple(each if isinstance(each, Value) else None for each in values), None
    return None, value


def _place(loc: Location) -> str:
    module = f" in {loc.module}" if loc.module else ""
    return f' at "{loc.file}":{loc.line}{module}' if loc.file else module


def _unsupported(node: fx.Node, loc: Location) -> Diagnostic:
    return Diagnostic(
        f"`{node.target}` in the captured graph is not an op that moaic can plan{_place(loc)}",
        hint="keep this part out of the compiled model, for example with torch.compiler.disable",
    )


# One spelling per meaning: dims counted from the front, sizes in full, element types said.


def _normal(
    attrs: dict[str, Attr], operands: Sequence[Operand], kinds: Sequence[TensorType], called: Signature
) -> dict[str, Attr]:
    rank = _rank(operands)
    if rank is not None:
        for name in ("dim", "dims", "dim0", "dim1"):
            if name in attrs:
                attrs[name] = _from_front(attrs[name], rank)
    if called.nullary and any(argument.kind == "dtype" for argument in called.arguments):
        attrs["dtype"] = kinds[0].dtype
    return attrs


def _rank(operands: Sequence[Operand]) -> int | None:
    for operand in operands:
        first = next((value for value in operand if value is not None), None) if isinstance(operand, tuple) else operand
        if first is not None:
            return len(first.type.shape)
    return None


def _from_front(dim: Attr, rank: int) -> Attr:
    if isinstance(dim, tuple):
        return tuple(_from_front(each, rank) for each in dim)
    return dim + rank if isinstance(dim, int) and dim < 0 and rank else dim


# Ops that become something else.


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that is read in a way of its own."""

    reader: _GraphReader
    node: fx.Node
    name: str
    operands: list[Operand]
    attrs: dict[str, Attr]
    kinds: list[TensorType]

    @property
    def x(self) -> Value:
        first = self.operands[0]
        assert isinstance(first, Value), self.name
        return first

    @property
    def kind(self) -> TensorType:
        return self.kinds[0]

    def emit(self, name: str, *operands: Operand, kind: TensorType | None = None, **attrs: Attr) -> Value:
        return self.reader.emit(name, operands, kind or self.kind, **attrs)

    def emit_as(self, name: str, operands: Sequence[Operand], attrs: Mapping[str, Attr]) -> Value:
        return self.reader.emit_many(name, operands, [self.kind], attrs)[0]


Special = Callable[[_Call], Any]


def _same(call: _Call) -> Value:
    return call.x


def _cast(call: _Call, x: Value | None = None) -> Value:
    x = x or call.x
    if x.type.dtype == call.kind.dtype:
        return x
    return call.emit("aten._to_copy", x, kind=TensorType(call.kind.dtype, x.type.shape), dtype=call.kind.dtype)


def _view(call: _Call) -> Value:
    return _reshaped(call, call.x)


def _reshaped(call: _Call, x: Value) -> Value:
    """A view of a view is one view."""
    found = call.reader.behind(x, "aten.view")
    x = x if found is None else found[0]
    return x if x.type.shape == call.kind.shape else call.emit("aten.view", x, size=call.kind.shape)


def _expand(call: _Call, x: Value | None = None) -> Value:
    x = x or call.x
    return x if x.type.shape == call.kind.shape else call.emit("aten.expand", x, size=call.kind.shape)


def _copy(call: _Call) -> Value:
    source = call.operands[1]
    assert isinstance(source, Value)
    return _expand(call, _cast(call, source))


def _slice(call: _Call) -> Value:
    dim = _from_front(call.attrs.get("dim", 0), len(call.x.type.shape))
    assert isinstance(dim, int)
    size = call.x.type.shape[dim]
    if call.x.type.shape == call.kind.shape and call.attrs.get("step", 1) == 1:
        return call.x
    start, end = (_clamped(call.attrs.get(name), size, other) for name, other in (("start", 0), ("end", size)))
    step = call.attrs.get("step", 1)
    assert isinstance(step, int)
    if step == 1:
        return call.emit_as("aten.slice.Tensor", [call.x], {"dim": dim, "start": start, "end": end})
    if call.kind.shape[dim] * step == size:
        return _one_of_each(call, dim, start, step)
    return call.emit_as("aten.slice.Tensor", [call.x], {"dim": dim, "start": start, "end": end, "step": step})


def _one_of_each(call: _Call, dim: int, place: int, step: int) -> Value:
    """What stands at `place` in every run of `step` elements: of a dim seen so, the runs can be split."""
    before, after = call.x.type.shape[:dim], call.x.type.shape[dim + 1 :]
    runs = _seen_as(call, call.x, (*before, call.kind.shape[dim], step, *after))
    return call.emit("aten.select.int", runs, dim=dim + 1, index=place)


def _clamped(at: Attr, size: int, default: int) -> int:
    if at is None:
        return default
    assert isinstance(at, int)
    return min(max(at + size if at < 0 else at, 0), size)


def _pad(call: _Call) -> Value:
    pads = call.attrs["pad"]
    assert isinstance(pads, tuple)
    return call.emit_as("aten.constant_pad_nd", [call.x], call.attrs) if any(pads) else call.x


def _permute(call: _Call) -> Value:
    rank = len(call.x.type.shape)
    order = list(range(rank))
    if call.name == "aten.permute":
        dims = _from_front(call.attrs["dims"], rank)
        assert isinstance(dims, tuple)
        order = [dim for dim in dims if isinstance(dim, int)]
    elif rank > 1:
        one, other = (_from_front(call.attrs.get(name, at), rank) for at, name in enumerate(("dim0", "dim1")))
        assert isinstance(one, int)
        assert isinstance(other, int)
        order[one], order[other] = order[other], order[one]
    return _permuted(call, call.x, order)


def _permuted(call: _Call, x: Value, order: list[int]) -> Value:
    """A permutation of a permutation is one, and may be none."""
    found = call.reader.behind(x, "aten.permute")
    if found is not None:
        x, before = found[0], found[1]["dims"]
        assert isinstance(before, tuple)
        order = [dim for at in order if isinstance(dim := before[at], int)]
    return x if order == sorted(order) else call.emit("aten.permute", x, dims=tuple(order))


def _cat(call: _Call) -> Value:
    """Without tensors that add nothing, as a cache that nothing was put in is: of their size no dim would split."""
    operand = call.operands[0]
    assert isinstance(operand, tuple)
    given = [value for value in operand if value is not None and value.type.elements()]
    if len(given) == 1:
        return _cast(call, given[0])
    has_its_type = any(value.type.dtype == call.kind.dtype for value in given)
    dim = _from_front(call.attrs.get("dim", 0), len(call.kind.shape))
    return call.emit_as("aten.cat", [tuple(given) if has_its_type else operand], {"dim": dim})


def _filled(value: Attr) -> Special:
    """Everything that makes a constant tensor is `aten.full`."""

    def fill(call: _Call) -> Value:
        wanted = call.attrs.get("fill_value", value)
        return call.emit(
            "aten.full", size=call.kind.shape, fill_value=_number(wanted, call.kind), dtype=call.kind.dtype
        )

    return fill


def _scalar(call: _Call) -> Value:
    return call.emit("aten.full", size=(), fill_value=_number(call.attrs["s"], call.kind), dtype=call.kind.dtype)


def _number(value: Attr, kind: TensorType) -> Attr:
    """A number of the kind of its tensor: 0.0 and not False in a float tensor."""
    assert isinstance(value, int | float)
    return bool(value) if kind.dtype == "bool" else float(value) if kind.dtype in FLOATING else value


def _sum(call: _Call) -> Value:
    rank = len(call.x.type.shape)
    dims = call.attrs.get("dim")
    every = tuple(range(rank))
    attrs = {name: value for name, value in call.attrs.items() if name != "dim"}
    if rank == 0:
        return _cast(call)
    reduced = _from_front(dims, rank) if dims else every
    return call.emit_as("aten.sum.dim_IntList", [call.x], {"dim": reduced, **attrs})


def _iota(call: _Call) -> Value:
    start, step, length = (call.attrs.get(name, other) for name, other in (("start", 0), ("step", 1), ("length", 0)))
    assert isinstance(start, int)
    assert isinstance(step, int)
    assert isinstance(length, int)
    return _range(call, start, start + step * length, step)


def _arange(call: _Call) -> Value:
    return _range(call, call.attrs.get("start", 0), call.attrs["end"], call.attrs.get("step", 1))


def _range(call: _Call, start: Attr, end: Attr, step: Attr) -> Value:
    attrs: dict[str, Attr] = {"start": start, "end": end, **({"step": step} if step != 1 else {})}
    return call.emit_as("aten.arange.start_step", [], {**attrs, "dtype": call.kind.dtype})


def _sdpa(call: _Call) -> list[Value]:
    query, key, value, mask = call.operands
    operands = [query, _for_each_head(call, query, key), _for_each_head(call, query, value), mask]
    return call.reader.emit_many("moai.sdpa", operands, call.kinds, _attention(call, query))


def _sdpa_backward(call: _Call) -> list[Value]:
    grad, query, key, value, *rest = call.operands
    wide_key, wide_value = (_for_each_head(call, query, x) for x in (key, value))
    operands = [grad, query, wide_key, wide_value, *rest]
    kinds = [call.kinds[0], wide_key.type, wide_value.type]
    found = call.reader.emit_many("moai.sdpa_backward", operands, kinds, _attention(call, query))
    return [_of_own_heads(call, grad, kind) for grad, kind in zip(found, call.kinds, strict=True)]


def _for_each_head(call: _Call, query: Operand, x: Operand) -> Value:
    """Keys or values repeated until every head of the query has its own: PyTorch's attention for CPUs shares them."""
    assert isinstance(query, Value)
    assert isinstance(x, Value)
    (batch, heads, *rest), wanted = x.type.shape, query.type.shape[1]
    if heads == wanted:
        return x
    spread = (batch, heads, wanted // heads, *rest)
    seen = _seen_as(call, x, (batch, heads, 1, *rest))
    repeated = call.emit("aten.expand", seen, kind=TensorType(x.type.dtype, spread), size=spread)
    return _seen_as(call, repeated, (batch, wanted, *rest))


def _of_own_heads(call: _Call, grad: Value, kind: TensorType) -> Value:
    """The sum of the gradients of all copies of a head."""
    if grad.type == kind:
        return grad
    batch, heads, *rest = kind.shape
    seen = _seen_as(call, grad, (batch, heads, grad.type.shape[1] // heads, *rest))
    return call.emit("aten.sum.dim_IntList", seen, kind=kind, dim=(2,))


def _attention(call: _Call, query: Operand) -> dict[str, Attr]:
    if call.attrs.get("dropout_p", 0.0):
        raise Diagnostic(f"attention with dropout must be taken apart{_place(call.reader.loc)}")
    assert isinstance(query, Value)
    scale = call.attrs.get("scale")
    return {
        "is_causal": bool(call.attrs.get("is_causal", False)),
        "scale": query.type.shape[-1] ** -0.5 if scale is None else scale,
    }


def _renamed(name: str) -> Special:
    """An op that is the same as another one."""
    return lambda call: call.emit_as(name, call.operands, call.attrs)


def _with_number(name: str) -> Special:
    """`mul.Scalar` and the like: a number in the place of the second tensor."""

    def run(call: _Call) -> Value:
        other: Any = call.attrs["other"]
        if not isinstance(other, complex):
            return call.emit_as(name, [*call.operands, None], call.attrs)
        rest = {key: value for key, value in call.attrs.items() if key != "other"}
        return call.emit_as(name, [*call.operands, call.reader.complex_number(other, call.kind.dtype)], rest)

    return run


def _scaled_mm(call: _Call) -> Value:
    """Scales are matrices. Other forms, with scales of blocks or a bias, stay as they are and are planned whole."""
    left, right, *scales = (operand for operand in call.operands if isinstance(operand, Value))
    wanted = [(left.type.shape[0], 1), (1, right.type.shape[1])]
    shapes = [(1, 1) if scale.type.elements() == 1 else scale.type.shape for scale in scales]
    if len(shapes) != 2 or any(shape not in ((1, 1), whole) for shape, whole in zip(shapes, wanted, strict=True)):
        return call.emit_as("aten._scaled_mm", call.operands, call.attrs)
    seen = [_seen_as(call, scale, shape) for scale, shape in zip(scales, shapes, strict=True)]
    fast = {"use_fast_accum": True} if call.attrs.get("use_fast_accum") else {}
    return call.emit_as(SCALED_MM, [left, right, *seen], {"dtype": call.kind.dtype, **fast})


def _seen_as(call: _Call, x: Value, shape: tuple[int, ...]) -> Value:
    if x.type.shape == shape:
        return x
    return call.emit("aten.view", x, kind=TensorType(x.type.dtype, shape), size=shape)


def _index(call: _Call) -> Value:
    base, indices = call.operands
    assert isinstance(base, Value)
    assert isinstance(indices, tuple)
    places = _place_in_each_row(call, base, indices)
    if places is None:
        return call.emit_as("aten.index.Tensor", call.operands, call.attrs)
    found = call.emit("aten.gather", base, places, kind=TensorType(base.type.dtype, places.type.shape), dim=1)
    return _seen_as(call, found, call.kind.shape)


def _place_in_each_row(call: _Call, base: Value, indices: Sequence[Value | None]) -> Value | None:
    """Of `x[arange(rows), places]`, which takes something of each row, the places as `gather` wants them."""
    if len(indices) != 2 or len(base.type.shape) < 2:
        return None
    rows, places = indices
    count, length, *inner = base.type.shape
    alike = TensorType("i64", (count,))
    if rows is None or places is None or not rows.type == places.type == alike or not _counts(call, rows):
        return None
    each, wide = (count, 1, *(1 for _ in inner)), (count, 1, *inner)
    column = call.emit("aten.view", _from_zero(call, places, length), kind=TensorType("i64", each), size=each)
    return _expanded(call, column, wide)


def _counts(call: _Call, numbers: Value) -> bool:
    """Whether these are 0, 1, 2 and so on."""
    made = call.reader.producers.get(numbers)
    if made is None or made.name != "aten.arange.start_step":
        return False
    return not made.attrs.get("start") and made.attrs.get("step", 1) == 1


def _expanded(call: _Call, x: Value, shape: tuple[int, ...]) -> Value:
    if x.type.shape == shape:
        return x
    return call.emit("aten.expand", x, kind=TensorType(x.type.dtype, shape), size=shape)


def _from_zero(call: _Call, index: Value, count: int) -> Value:
    """An index that names nothing from the end."""
    below = call.emit("aten.lt.Scalar", index, kind=TensorType("bool", index.type.shape), other=0)
    wrapped = call.emit("aten.add.Tensor", index, None, kind=index.type, other=count)
    return call.emit("aten.where.self", below, wrapped, index, kind=index.type)


def _index_put(call: _Call) -> Value:
    """The gradient of a look-up of rows is that of an embedding, which splits over the look-ups too."""
    base, indices, values = call.operands
    assert isinstance(base, Value)
    assert isinstance(indices, tuple)
    assert isinstance(values, Value)
    adds_to_nothing = call.attrs.get("accumulate") and _is_zero(call, base)
    if adds_to_nothing and (places := _place_in_each_row(call, base, indices)) is not None:
        taken = (base.type.shape[0], *base.type.shape[2:])
        source = _seen_as(call, _expanded(call, values, taken), places.type.shape)
        return call.emit_as("aten.scatter_add", [base, places, source], {"dim": 1})
    rows = indices[0]
    looked_up = len(indices) == 1 and rows is not None and rows.type.dtype == "i64"
    if not (adds_to_nothing and looked_up and base.type.dtype in FLOATING):
        return call.emit_as("aten.index_put", call.operands, call.attrs)
    assert rows is not None
    count, *inner = base.type.shape
    wanted = (*rows.type.shape, *inner)
    values = _expanded(call, values, wanted)
    found = _from_zero(call, rows, count)
    return _summed_by_row(call, values, found, TensorType(base.type.dtype, (count, prod(inner))), base.type.shape)


def _scatter_add(call: _Call) -> Value:
    """Sums by index, from zero, are those of an embedding's gradient, which splits over what is summed too."""
    base, index, source = call.operands
    assert isinstance(base, Value)
    assert isinstance(index, Value)
    assert isinstance(source, Value)
    plain = len(base.type.shape) == 1 and index.type.shape == source.type.shape and base.type.dtype in FLOATING
    if not (_is_zero(call, base) and plain):
        return call.emit_as("aten.scatter_add", call.operands, call.attrs)
    return _summed_by_row(call, source, index, TensorType(base.type.dtype, (base.type.shape[0], 1)), base.type.shape)


def _is_zero(call: _Call, value: Value) -> bool:
    made = call.reader.producers.get(value)
    return made is not None and made.name == "aten.full" and not made.attrs["fill_value"]


def _summed_by_row(call: _Call, values: Value, rows: Value, table: TensorType, shape: tuple[int, ...]) -> Value:
    """For each row of `table` the sum of the values whose index names it, seen as a tensor of `shape`."""
    wanted = (*rows.type.shape, table.shape[1])
    grad = call.emit("aten.view", values, kind=TensorType(values.type.dtype, wanted), size=wanted)
    attrs: dict[str, Attr] = {"num_weights": table.shape[0], "padding_idx": -1, "scale_grad_by_freq": False}
    summed = call.emit("aten.embedding_dense_backward", grad, rows, kind=table, **attrs)
    return call.emit("aten.view", summed, size=shape)


def _as_strided(call: _Call) -> Value:
    """Legal only where it changes strides alone, or is a view of a contiguous tensor."""
    (source, *_), result = call.node.args, call.node.meta["val"]
    assert isinstance(source, fx.Node)
    before = source.meta["val"]
    same = before.shape == result.shape and _strides(before) == _strides(result)
    dense = before.is_contiguous() and result.is_contiguous() and before.numel() == result.numel()
    if result.storage_offset() == before.storage_offset() and (same or dense):
        return _view(call)
    raise _own_order(call, "as_strided", "reads")


def _as_strided_scatter(call: _Call) -> Value:
    """What takes the place of a whole tensor, element by element in its order, is a view of it."""
    base, result = call.node.args[0], call.node.meta["val"]
    assert isinstance(base, fx.Node)
    if not base.meta["val"].is_contiguous():
        raise _own_order(call, "as_strided_scatter", "writes")
    written = call.operands[1]
    assert isinstance(written, Value)
    size, stride = (cast("Sequence[int]", call.attrs[name]) for name in ("size", "stride"))
    covers = written.type.elements() == result.numel() and not call.attrs.get("storage_offset")
    if covers and torch.empty_strided(size, stride, device="meta").is_contiguous():
        return _reshaped(call, written)
    return call.emit_as(call.name, call.operands, call.attrs)


def _own_order(call: _Call, name: str, does: str) -> Diagnostic:
    return Diagnostic(
        f"`{name}` {does} a tensor in an order of its own{_place(call.reader.loc)}",
        hint="use view, slices or expand in its place",
    )


def _strides(tensor: Tensor) -> list[Any]:
    """Strides of the dims that have any elements to step over."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]


# Random ops: all of them from uniform numbers of our own.


def _rand(call: _Call) -> Value:
    return _cast(call, call.reader.rand(call.kind.shape))


def _bernoulli(call: _Call) -> Value:
    uniform = call.reader.rand(call.kind.shape)
    truth = TensorType("bool", call.kind.shape)
    given = call.operands[1] if len(call.operands) > 1 else None
    if "p" in call.attrs:
        drawn = call.emit("aten.lt.Scalar", uniform, kind=truth, other=call.attrs["p"])
    else:
        drawn = call.emit("aten.lt.Tensor", uniform, given or call.x, kind=truth)
    return _cast(call, drawn)


def _dropout(call: _Call) -> list[Value]:
    """What is kept, `x * (u > p) / (1 - p)`, and the mask."""
    p, train = call.attrs["p"], call.attrs.get("train", True)
    assert isinstance(p, int | float)
    kind, mask_kind = call.kinds
    if train is False or p == 0:
        ones = call.emit("aten.full", kind=mask_kind, size=mask_kind.shape, fill_value=True, dtype="bool")
        return [call.x, ones]
    mask = call.emit("aten.gt.Scalar", call.reader.rand(kind.shape), kind=mask_kind, other=float(p))
    kept = call.emit("aten.mul.Tensor", call.x, mask, kind=kind)
    scale = 1.0 / (1.0 - p) if p < 1 else 0.0
    return [call.emit("aten.mul.Tensor", kept, None, kind=kind, other=scale), mask]


def _normal_numbers(call: _Call) -> Value:
    return _cast(call, _standard_normal(call))


def _standard_normal(call: _Call) -> Value:
    """Box-Muller: sqrt(-2 ln(1 - u)) cos(2 pi v)."""
    drawn = _minus_log(call)
    wide = drawn.type
    radius = call.emit("aten.sqrt", call.emit("aten.mul.Tensor", drawn, None, kind=wide, other=2.0), kind=wide)
    v = call.reader.rand(wide.shape)
    angle = call.emit("aten.cos", call.emit("aten.mul.Tensor", v, None, kind=wide, other=2 * pi), kind=wide)
    return call.emit("aten.mul.Tensor", radius, angle, kind=wide)


def _averages_backward(call: _Call) -> Value:
    """Inductor wants a number for each of two dims, where one for both may be given."""
    wide = {name: given * 2 for name, given in call.attrs.items() if isinstance(given, tuple) and len(given) == 1}
    return call.emit_as(call.name, call.operands, {**call.attrs, **wide})


def _integers(call: _Call) -> Value:
    """floor(u * (high - low)) + low; ranges up to 2**24 are exact."""
    low, high = call.attrs.get("low", 0), call.attrs["high"]
    assert isinstance(low, int)
    assert isinstance(high, int)
    uniform = call.reader.rand(call.kind.shape)
    wide = uniform.type
    spread = call.emit("aten.mul.Tensor", uniform, None, kind=wide, other=float(high - low))
    whole = _cast(call, call.emit("aten.floor", spread, kind=wide))
    return call.emit("aten.add.Tensor", whole, None, other=low) if low else whole


def _uniform(call: _Call) -> Value:
    low, high = call.attrs.get("from", 0.0), call.attrs.get("to", 1.0)
    assert isinstance(low, int | float)
    assert isinstance(high, int | float)
    wide = TensorType("f32", call.kind.shape)
    return _cast(call, _scaled(call, call.reader.rand(wide.shape), float(high - low), low))


def _scaled(call: _Call, x: Value, scale: Attr, shift: Attr) -> Value:
    scaled = call.emit("aten.mul.Tensor", x, None, kind=x.type, other=scale)
    return call.emit("aten.add.Tensor", scaled, None, kind=x.type, other=shift)


def _exponential(call: _Call) -> Value:
    """-ln(1 - u) / lambda, never zero: as in PyTorch it is at least half of what float32 tells from one."""
    drawn = _minus_log(call)
    above = call.emit("aten.clamp_min", drawn, kind=drawn.type, min=2.0**-24)
    return _cast(call, call.emit("aten.div.Tensor", above, None, kind=drawn.type, other=call.attrs.get("lambd", 1.0)))


def _geometric(call: _Call) -> Value:
    """How many tries until one succeeds: the exponential numbers of that rate, rounded up."""
    p = call.attrs["p"]
    assert isinstance(p, int | float)
    drawn = _minus_log(call)
    tries = call.emit("aten.div.Tensor", drawn, None, kind=drawn.type, other=-log1p(-p) if p < 1 else inf)
    whole = call.emit("aten.ceil", tries, kind=drawn.type)
    return _cast(call, call.emit("aten.clamp_min", whole, kind=drawn.type, min=1.0))


def _minus_log(call: _Call) -> Value:
    """-ln(1 - u)."""
    wide = TensorType("f32", call.kind.shape)
    kept = _scaled(call, call.reader.rand(wide.shape), -1.0, 1.0)
    return call.emit("aten.neg", call.emit("aten.log", kept, kind=wide), kind=wide)


def _cauchy(call: _Call) -> Value:
    """The median + sigma tan(pi (u - 1/2))."""
    wide = TensorType("f32", call.kind.shape)
    turn = _scaled(call, call.reader.rand(wide.shape), pi, -pi / 2)
    drawn = call.emit("aten.tan", turn, kind=wide)
    return _cast(call, _scaled(call, drawn, call.attrs.get("sigma", 1.0), call.attrs.get("median", 0.0)))


def _normal_of(call: _Call) -> Value:
    return _cast(call, _spread(call, 0.0, 1.0))


def _log_normal(call: _Call) -> Value:
    drawn = _spread(call, 1.0, 2.0)
    return _cast(call, call.emit("aten.exp", drawn, kind=drawn.type))


def _spread(call: _Call, mean: float, std: float) -> Value:
    """Normal numbers of the mean and the deviation that the call names, or of these."""
    return _scaled(call, _standard_normal(call), call.attrs.get("std", std), call.attrs.get("mean", mean))


def _refuse_random(call: _Call) -> Any:
    raise Diagnostic(
        f"`{call.name}` draws random numbers in a way that would depend on the plan{_place(call.reader.loc)}",
        hint="draw from torch.rand, torch.randn or dropout, or draw outside the compiled model",
    )


def _refuse(call: _Call) -> Any:
    raise Diagnostic(
        f"`{call.name}` gives a result whose size depends on values{_place(call.reader.loc)}",
        hint="keep this part out of the compiled model, for example with torch.compiler.disable",
    )


def _each(names: str, special: Special) -> dict[str, Special]:
    return dict.fromkeys(names.split(), special)


_SPECIAL: Final[Mapping[str, Special]] = {
    **_each(
        """aten.alias aten.clone aten.detach aten.lift_fresh aten.lift_fresh_copy
        prims.view_of prims.clone prims.device_put""",
        _same,
    ),
    **_each("aten._to_copy prims.convert_element_type", _cast),
    **_each(
        """aten.view aten._unsafe_view aten.reshape aten.unsqueeze aten.squeeze aten.squeeze.dim aten.squeeze.dims
        prims.collapse_view prims.split_dim""",
        _view,
    ),
    "aten.expand": _expand,
    "aten.copy": _copy,
    "aten.cat": _cat,
    "aten.slice.Tensor": _slice,
    "aten.constant_pad_nd": _pad,
    **_each("aten.permute aten.transpose.int aten.t", _permute),
    **_each("aten.full aten.full_like aten.new_full", _filled(0)),
    **_each("aten.zeros aten.zeros_like aten.new_zeros", _filled(0)),
    **_each("aten.ones aten.ones_like aten.new_ones", _filled(1)),
    **_each(
        """aten.empty.memory_format aten.empty_like aten.new_empty aten.empty_strided aten.empty_permuted
        aten.new_empty_strided prims.empty_strided""",
        _filled(0),
    ),
    "aten.scalar_tensor": _scalar,
    **_each("aten.sum aten.sum.dim_IntList", _sum),
    "prims.iota": _iota,
    **_each("aten.arange aten.arange.start aten.arange.start_step", _arange),
    "aten._scaled_dot_product_flash_attention_for_cpu": _sdpa,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _sdpa_backward,
    "moai.sdpa": _sdpa,
    "moai.sdpa_backward": _sdpa_backward,
    "aten._scaled_mm": _scaled_mm,
    **_each("aten.index_put aten._unsafe_index_put", _index_put),
    "aten.index.Tensor": _index,
    "aten.scatter_add": _scatter_add,
    "aten.avg_pool2d_backward": _averages_backward,
    "aten._unsafe_index.Tensor": _index,
    **{f"aten.{name}.Scalar": _with_number(f"aten.{name}.Tensor") for name in ("add", "sub", "mul", "div")},
    "aten.as_strided": _as_strided,
    "aten.as_strided_scatter": _as_strided_scatter,
    # A conjugate that is only marked as one has no meaning in memory.
    **_each("aten._conj aten._conj_physical", _renamed("aten.conj_physical")),
    "aten._neg_view": _renamed("aten.neg"),
    **_each("aten.resolve_conj aten.resolve_neg", _same),
    **_each("aten.rand aten.rand_like", _rand),
    **_each("aten.bernoulli aten.bernoulli.p aten.bernoulli.Tensor", _bernoulli),
    "aten.native_dropout": _dropout,
    **_each("aten.randn aten.randn_like", _normal_numbers),
    **_each("aten.randint aten.randint.low aten.randint_like aten.randint_like.low_dtype", _integers),
    "aten.uniform": _uniform,
    "aten.exponential": _exponential,
    "aten.geometric": _geometric,
    "aten.cauchy": _cauchy,
    "aten.log_normal": _log_normal,
    "aten.normal_functional": _normal_of,
    **_each(
        """aten.multinomial aten.normal.Tensor_Tensor aten.poisson aten.binomial aten._standard_gamma""",
        _refuse_random,
    ),
    **_each("aten.nonzero aten.masked_select aten._unique2 aten._local_scalar_dense aten.unique_dim", _refuse),
}
"""Calls that are more than an op of the same name."""


# The two graphs that AOTAutograd takes in place of a partition: it looks at what goes in and out, and runs neither.


def forward_stub(joint: fx.GraphModule, program: FxProgram) -> fx.GraphModule:
    """Arguments in; outputs and one ticket out, which is all that is saved for the backward."""
    graph = fx.Graph()
    copies = {node: _copied(graph, node) for node in program.primals}
    outputs = [_stand_in(graph, node, copies) for node in program.returned[: program.forward_outputs]]
    ticket = graph.call_function(_never_run)
    ticket.meta["val"] = _example_ticket()
    _output(graph, [*outputs, ticket], program.descriptions[: program.forward_outputs])
    return fx.GraphModule(joint, graph)


def backward_stub(joint: fx.GraphModule, program: FxProgram) -> fx.GraphModule:
    """The ticket and tangents in; gradients out."""
    graph = fx.Graph()
    ticket = graph.placeholder("ticket")
    ticket.meta["val"] = _example_ticket()
    copies = {node: _copied(graph, node) for node in program.tangents}
    grads = [_stand_in(graph, node, copies) for node in program.returned[program.forward_outputs :]]
    _output(graph, grads, program.descriptions[program.forward_outputs :])
    return fx.GraphModule(joint, graph)


def _example_ticket() -> Tensor:
    return torch.empty(TICKET_WORDS, dtype=torch.int64)


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
