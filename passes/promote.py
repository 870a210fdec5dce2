"""Every floating value of a module in one type: float64 is what exactness is proved in.

Casts, constants and results alike: a float32 left anywhere would hide an error of a plan behind its own rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from moaic.ir.graph import Attr, Function, Module, Op, Value
from moaic.ir.types import FLOATING, TensorType


def promote(module: Module, dtype: str = "f64") -> Module:
    """`module` in `dtype`, complex numbers in parts of it; integers, booleans and random keys stay as they are."""
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


COMPLEX = {"f64": "c128", "f32": "c64"}
"""The type of complex numbers whose parts are of a floating type."""


def _type(type_: TensorType, dtype: str) -> TensorType:
    return TensorType(_name(type_.dtype, dtype), type_.shape, type_.layout)


def _attr(value: Attr, dtype: str) -> Attr:
    return _name(value, dtype) if isinstance(value, str) else value


def _name(given: str, dtype: str) -> str:
    if given in COMPLEX.values():
        return COMPLEX.get(dtype, given)
    return dtype if given in FLOATING else given
