"""Every floating value of a module in one type: float64 is what exactness is proved in.

Casts, constants and results alike: a float32 left anywhere would hide an error of a plan behind its own rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from moaic.ir.graph import Attr, Function, Module, Op, Value
from moaic.ir.types import FLOATING, TensorType


def promote(module: Module, dtype: str = "f64") -> Module:
    """`module` in `dtype`; integers, booleans and random keys stay as they are."""
    return replace(module, functions=tuple(_function(function, dtype) for function in module.functions))


def _function(function: Function, dtype: str) -> Function:
    mapping = {value: Value(_type(value.type, dtype), value.name) for value in function.values()}
    return replace(
        function,
        params=tuple(mapping[param] for param in function.params),
        ops=tuple(_op(op, mapping, dtype) for op in function.ops),
        results=tuple(mapping[result] for result in function.results),
    )


def _op(op: Op, mapping: Mapping[Value, Value], dtype: str) -> Op:
    attrs = {name: _attr(value, dtype) for name, value in op.attrs.items()}
    return replace(op.with_operands(mapping), results=tuple(mapping[result] for result in op.results), attrs=attrs)


def _type(type_: TensorType, dtype: str) -> TensorType:
    return TensorType(dtype, type_.shape, type_.layout) if type_.dtype in FLOATING else type_


def _attr(value: Attr, dtype: str) -> Attr:
    return dtype if isinstance(value, str) and value in FLOATING else value
