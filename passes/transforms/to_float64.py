"""Convert every floating value of a module to one type: exactness of plans is proved in float64.

Casts and constants too: one float32 value would hide an error of a plan behind its own rounding. An op that makes
floats from integers alone would give PyTorch's default type, so its operands are cast first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from moaic.ir.graph import Attr, Function, Module, Op, Value
from moaic.ir.op_names import RAND
from moaic.ir.types import FLOATING, TensorType


@dataclass(frozen=True, slots=True)
class ToFloat64:
    name: ClassVar[str] = "promote"
    summary: ClassVar[str] = "compute every floating-point value in float64"

    def apply(self, module: Module) -> Module:
        return promote(module)


def promote(module: Module, dtype: str = "f64") -> Module:
    """`module` in `dtype`, complex numbers of two such parts; integers, booleans and random keys stay as they are."""
    return replace(module, functions=tuple(_function(function, dtype) for function in module.functions))


def _function(function: Function, dtype: str) -> Function:
    mapping = {value: Value(_type(value.type, dtype), value.name) for value in function.values()}
    return replace(
        function,
        params=tuple(mapping[param] for param in function.params),
        ops=tuple(each for op in function.ops for each in _ops(op, mapping, dtype)),
        results=tuple(mapping[result] for result in function.results),
    )


def _ops(op: Op, mapping: Mapping[Value, Value], dtype: str) -> Iterator[Op]:
    """The op in `dtype`, after casts of its operands if it makes floats from integers without a dtype attribute."""
    cast: dict[Value, Value] = {}
    if _divides(op):
        cast = {value: Value(TensorType(dtype, value.type.shape, value.type.layout)) for value in op.inputs()}
        for value, wide in cast.items():
            yield Op("aten._to_copy", (mapping.get(value, value),), (wide,), {"dtype": dtype}, op.loc)
    attrs = {name: _attr(value, dtype) for name, value in op.attrs.items()}
    results = tuple(mapping[result] for result in op.results)
    yield replace(op.with_operands({**mapping, **cast}), results=results, attrs=attrs)


def _divides(op: Op) -> bool:
    """Whether an op makes floats from integers or booleans in the default type: no cast, no random number."""
    if op.name in ("call", RAND) or "dtype" in op.attrs or all(r.type.dtype not in FLOATING for r in op.results):
        return False
    kinds = {value.type.dtype for value in op.inputs()}
    return bool(kinds) and kinds.isdisjoint({*FLOATING, *COMPLEX.values()})


COMPLEX = {"f64": "c128", "f32": "c64"}
"""By floating type, the complex type of two such parts."""


def _type(type_: TensorType, dtype: str) -> TensorType:
    return TensorType(_name(type_.dtype, dtype), type_.shape, type_.layout)


def _attr(value: Attr, dtype: str) -> Attr:
    return _name(value, dtype) if isinstance(value, str) else value


def _name(given: str, dtype: str) -> str:
    if given in COMPLEX.values():
        return COMPLEX.get(dtype, given)
    return dtype if given in FLOATING else given
