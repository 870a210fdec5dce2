"""The walk over an FX graph: each node becomes a value of the IR, its calls become ops.

Strides, devices, copies and aliases end here: the IR has values only. What outputs share is kept beside the function,
by `assemble`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx
from torch._ops import OpOverload
from torch.utils._mode_utils import no_dispatch

from moaic.capture.fx.attributes import normalized
from moaic.capture.fx.body_writer import BodyWriter
from moaic.capture.fx.op_call import OpCall
from moaic.capture.fx.op_table import REWRITES
from moaic.capture.fx.open_sizes import DependsOnValues, SymbolSizes, number_of
from moaic.capture.fx.traced_graph import WITH_EFFECTS, TracedGraph, sequence
from moaic.capture.provenance import described, location
from moaic.capture.value_checks import DEFAULT_MESSAGE
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Attr, Location, Operand, Value
from moaic.ir.op_names import CHECKED
from moaic.ir.types import FLOATING, INTEGERS, TensorType
from moaic.runtime.dtypes import DTYPE_NAMES
from moaic.runtime.protocol.aten_schema import NAMESPACES, Argument, Signature, op_name, signature_of

aten = torch.ops.aten

_CHECKS: Final = frozenset({aten._assert_async.msg, aten._assert_async.default, WITH_EFFECTS})
"""Calls that give nothing and raise where a value is wrong."""


class GraphReader:
    """One pass over the nodes of `traced`: the value of each node, and the ops so far."""

    def __init__(self, traced: TracedGraph, sizes: SymbolSizes) -> None:
        self.traced = traced
        self.sizes = sizes
        self.builder = BodyWriter()
        self.values: dict[fx.Node, Any] = {}
        """Per node a Value, a number, None, or a list of these."""
        self.constants: list[tuple[Value, Tensor]] = []
        for node in traced.nodes:
            if node.op != "output":
                self.builder.loc = location(node.meta)
                self.values[node] = self._node(node)

    def value(self, returned: Any) -> Any:
        """The value, number or None that the graph returns at one place."""
        return self.values[returned] if isinstance(returned, fx.Node) else self.concrete(returned)

    def concrete(self, value: Any) -> Any:
        """`value` as a number or a size of the IR if it is symbolic, else as it is."""
        if not isinstance(value, SymInt | SymFloat | SymBool):
            return value
        try:
            return number_of(value, self.sizes)
        except DependsOnValues as size:
            raise Diagnostic(
                f"a size in this graph depends on values ({size}){described(self.builder.loc)}",
                hint="make the size a plain number, or keep this part out of the compiled model",
            ) from None

    def _node(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self._placeholder(node)
        if node.op == "get_attr":
            return self._constant(self.traced.attribute(str(node.target)))
        if node.target is operator.getitem:
            container, index = node.args
            assert isinstance(container, fx.Node)
            return self.values[container][index]
        if node.target in _CHECKS:
            return self._check(node)
        if node.target is aten._assert_scalar.default:
            # It is about sizes, which Dynamo compares before each call: a number that depends on values was refused.
            return None
        value = node.meta.get("val")
        if isinstance(value, int | float | bool | SymInt | SymFloat | SymBool):
            return self.concrete(value)
        is_known = isinstance(node.target, OpOverload) and node.target.namespace in NAMESPACES
        if not is_known or "val" not in node.meta:
            raise _unsupported(node, self.builder.loc)
        return self._call(node, cast("OpOverload[..., Any]", node.target))

    def _placeholder(self, node: fx.Node) -> Any:
        value = node.meta["val"]
        if node in self.traced.tokens:
            return None
        if not isinstance(value, Tensor):
            return self.concrete(value)
        role = self.traced.role(node)
        prefix = f"{role.kind}." if role.kind == "tangent" else ""
        return Value(self._type(value), prefix + role.label)

    def _constant(self, tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        with no_dispatch():  # a model without weights is captured among tensors without values
            tensor = tensor.detach().cpu()
            number = None if tensor.dim() else tensor.item()
        type_ = TensorType(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
        if isinstance(number, complex):
            return self.builder.complex_number(number, type_.dtype)
        if number is not None:
            return self.builder.emit("aten.full", (), type_, size=(), fill_value=number, dtype=type_.dtype)
        value = Value(type_, f"constant{len(self.constants)}")
        self.constants.append((value, tensor))
        return value

    def _check(self, node: fx.Node) -> tuple[None, ...]:
        """An assertion that a tensor is true, or that a routine's error codes beside its result are 0.

        An op with effects gets a token from the one before it; in the IR the values alone order such ops, so no token
        has a value.
        """
        has_effects = node.target is WITH_EFFECTS
        if has_effects and node.args[1] is not aten._linalg_check_errors.default:
            raise _unsupported(node, self.builder.loc)
        asked, message = (*(node.args[2:4] if has_effects else node.args), DEFAULT_MESSAGE)[:2]
        condition: Value = self.values[cast("fx.Node", asked)]
        value = self.builder.producers[condition].results[0] if has_effects else condition
        self.builder.emit(CHECKED, [value, condition], value.type, message=str(message))
        return (None, None)

    def _call(self, node: fx.Node, overload: OpOverload[..., Any]) -> Any:
        name = op_name(overload)
        signature = signature_of(overload)
        operands, attrs = self._arguments(node, signature)
        example = node.meta["val"]
        types = [self._type(value) for value in sequence(example) if isinstance(value, Tensor)]
        rewrite = REWRITES.get(name)
        if rewrite is not None:
            first = next(iter(node.args), None)
            source = first.meta.get("val") if isinstance(first, fx.Node) else None
            return rewrite(OpCall(self.builder, name, operands, attrs, types, source, example))
        if "pointwise" in signature.tags and "condition" not in signature.names:
            operands = self._promoted(operands, types[0].dtype)
        results = self.builder.emit_many(name, operands, types, normalized(attrs, operands, types, signature))
        if isinstance(example, Tensor):
            return results[0]
        rest = iter(results)
        return [next(rest) if isinstance(value, Tensor) else None for value in example]

    def _arguments(self, node: fx.Node, signature: Signature) -> tuple[list[Operand], dict[str, Attr]]:
        """The call's tensors as operands, and the rest but placement and defaults as attributes."""
        operands: list[Operand] = []
        attrs: dict[str, Attr] = {}
        for argument, given in _given(node, signature):
            value = self._argument(given)
            if argument.is_tensor:
                if isinstance(value, complex):
                    value = self.builder.complex_number(value, self._type(node.meta["val"]).dtype)
                operand, number = _as_operand(value)
                operands.append(operand)
                if number is not None:
                    attrs[argument.name] = number
            elif argument.is_attribute and (argument.required or value != self._argument(argument.default)):
                attrs[argument.name] = value
        return operands, attrs

    def _promoted(self, operands: list[Operand], dtype: str) -> list[Operand]:
        """The operands of an elementwise op, cast where integers give floats of another dtype than workers' default.

        Such floats have the default dtype of the script.
        """
        values = [operand for operand in operands if isinstance(operand, Value)]
        if dtype not in FLOATING - {"f32"} or any(value.type.dtype not in INTEGERS for value in values):
            return operands
        cast_to: dict[Operand, Operand] = {
            value: self.builder.emit("aten._to_copy", [value], TensorType(dtype, value.type.shape), dtype=dtype)
            for value in values
        }
        return [cast_to.get(operand, operand) for operand in operands]

    def _argument(self, given: Any) -> Any:
        if isinstance(given, fx.Node):
            return self.values[given]
        if isinstance(given, list | tuple):
            return tuple(self._argument(item) for item in cast("Sequence[Any]", given))
        if isinstance(given, torch.dtype):
            return DTYPE_NAMES[given]
        return self.concrete(given) if isinstance(given, SymInt | SymFloat | SymBool) else given

    def _type(self, tensor: Tensor) -> TensorType:
        if tensor.dtype not in DTYPE_NAMES:
            raise Diagnostic(
                f"a tensor of {tensor.dtype} is in the graph{described(self.builder.loc)}: this element type is unknown"
            )
        return TensorType(DTYPE_NAMES[tensor.dtype], tuple(self.concrete(size) for size in tensor.shape))


def _given(node: fx.Node, signature: Signature) -> list[tuple[Argument, Any]]:
    """Each argument of the op with what the call gives for it."""
    positional = iter(node.args)
    pairs: list[tuple[Argument, Any]] = []
    for argument in signature.arguments:
        named = node.kwargs.get(argument.name, argument.default)
        pairs.append((argument, named if argument.keyword else next(positional, named)))
    return pairs


def _as_operand(value: Any) -> tuple[Operand, Attr]:
    """The operand, or the number that the call gives in place of a tensor."""
    if value is None or isinstance(value, Value):
        return value, None
    if isinstance(value, tuple):
        values = cast("tuple[Any, ...]", value)
        return tuple(item if isinstance(item, Value) else None for item in values), None
    return None, value


def _unsupported(node: fx.Node, loc: Location) -> Diagnostic:
    return Diagnostic(
        f"`{node.target}` in the captured graph is not an op that moaic can plan{described(loc)}",
        hint="keep this part out of the compiled model, for example with torch.compiler.disable",
    )
