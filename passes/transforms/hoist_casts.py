"""Hoist narrowing casts of a function's parameters to its callers, so that parameters are gathered in the narrow type.

Legal where equal casts alone read the parameter: the values are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from moaic.ir.graph import Function, Module, Op, Value
from moaic.ir.types import DTYPE_BYTES, FLOATING, TensorType

CAST = "aten._to_copy"


@dataclass(frozen=True, slots=True)
class HoistCasts:
    name: ClassVar[str] = "hoist"
    summary: ClassVar[str] = "cast parameters once where the program begins, not inside functions"

    def apply(self, module: Module) -> Module:
        return hoist_casts(module)


def hoist_casts(module: Module) -> Module:
    """`module` with every narrowing cast of a callee's parameter hoisted to the callers."""
    narrowed: dict[str, dict[int, str]] = {}
    functions: list[Function] = []
    for function in module.functions:
        casting = _casting(function, narrowed)
        if function is not module.main:
            narrowed[function.name] = _narrowed(casting)
            casting = _entering_narrow(casting, narrowed[function.name])
        functions.append(casting)
    return Module(tuple(functions), module.mesh)


def _casting(function: Function, narrowed: Mapping[str, Mapping[int, str]]) -> Function:
    """`function` with the casts hoisted out of its callees: each value once in the forward, once in the backward."""
    casts: dict[tuple[Value, str, str], Value] = {}
    ops: list[Op] = []
    for op in function.ops:
        if op.name != "call":
            ops.append(op)
            continue
        operands = list(op.operands)
        for position, dtype in narrowed[op.callee].items():
            value = operands[position]
            assert isinstance(value, Value)
            key = (value, dtype, op.loc.side)
            if key not in casts:
                casts[key] = Value(TensorType(dtype, value.type.shape, value.type.layout), value.name)
                ops.append(Op(CAST, (value,), (casts[key],), {"dtype": dtype}, op.loc))
            operands[position] = casts[key]
        ops.append(replace(op, operands=tuple(operands)))
    return replace(function, ops=tuple(ops))


def narrows(op: Op) -> bool:
    """Whether an op only casts a floating value to a narrower type."""
    if op.name != CAST:
        return False
    (source,) = op.inputs()
    source_dtype, dtype = source.type.dtype, op.results[0].type.dtype
    return {source_dtype, dtype} <= FLOATING and DTYPE_BYTES[dtype] < DTYPE_BYTES[source_dtype]


def _narrowed(function: Function) -> dict[int, str]:
    """By position, the type of parameters that only narrowing casts to this type read."""
    readers: dict[Value, list[Op]] = {param: [] for param in function.params}
    for op in function.ops:
        for value in op.inputs():
            if value in readers:
                readers[value].append(op)
    narrowed: dict[int, str] = {}
    for position, param in enumerate(function.params):
        dtypes = {op.results[0].type.dtype if narrows(op) else "" for op in readers[param]}
        if len(dtypes) == 1 and "" not in dtypes and param not in function.results:
            narrowed[position] = dtypes.pop()
    return narrowed


def _entering_narrow(function: Function, narrowed: dict[int, str]) -> Function:
    params = list(function.params)
    mapping: dict[Value, Value] = {}
    for position, dtype in narrowed.items():
        old = params[position]
        params[position] = Value(TensorType(dtype, old.type.shape, old.type.layout), old.name)
        for op in function.ops:
            if old in op.inputs():
                mapping[op.results[0]] = params[position]
    ops = tuple(op.with_operands(mapping) for op in function.ops if op.results[0] not in mapping)
    results = tuple(mapping.get(value, value) for value in function.results)
    return replace(function, params=tuple(params), ops=ops, results=results)
