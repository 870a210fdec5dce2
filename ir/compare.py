"""Comparison of modules: values are compared by where they are defined, never by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest

from moaic.ir.graph import Attr, Function, Module, Op, Operand, Role, Value
from moaic.ir.layout import Mesh
from moaic.ir.printer import render_op, value_names

Positions = Mapping[Value, int]


def equal(left: Module, right: Module) -> bool:
    """Same mesh and the same functions in the same order, hints of names aside."""
    return difference(left, right) is None


def difference(left: Module, right: Module) -> str | None:
    """The first difference of two modules, with both sides; None where they are equal."""
    return next(_module_differences(left, right), None)


def equal_attrs(left: Mapping[str, Attr], right: Mapping[str, Attr]) -> bool:
    """Same names and values, order aside: 1, 1.0 and true are three values, nan is one."""
    return left.keys() == right.keys() and all(_equal_attr(value, right[name]) for name, value in left.items())


def _equal_attr(left: Attr, right: Attr) -> bool:
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(_equal_attr, left, right))
    return type(left) is type(right) and (
        repr(left) == repr(right) if isinstance(left, float | complex) else left == right
    )


def _module_differences(left: Module, right: Module) -> Iterator[str]:
    if left.mesh != right.mesh:
        yield f"the meshes are {left.mesh} and {right.mesh}"
    if left.schedule != right.schedule:
        yield f"the schedules are {left.schedule} and {right.schedule}"
    for one, other in zip_longest(left.functions, right.functions):
        if one is None or other is None:
            yield f"one module has {len(left.functions)} functions, the other {len(right.functions)}"
        else:
            yield from _function_differences(one, other, left.mesh)


def _function_differences(left: Function, right: Function, mesh: Mesh) -> Iterator[str]:
    one, other = _positions(left), _positions(right)
    where = f"in function `@{left.name}`: "
    if left.name != right.name:
        yield f"a function is called `@{left.name}` and `@{right.name}`"
    if _types(left.params) != _types(right.params):
        yield where + "the parameters have other types"
    if _param_roles(left) != _param_roles(right):
        yield where + "the parameters have other roles"
    for op, twin in zip_longest(left.ops, right.ops):
        if op is None or twin is None:
            yield f"{where}one has {len(left.ops)} ops, the other {len(right.ops)}"
        elif not _equal_op(op, one, twin, other):
            first, second = render_op(op, value_names(left), mesh), render_op(twin, value_names(right), mesh)
            yield f"{where}\n  {first}\nis not\n  {second}"
    if [one.get(value) for value in left.results] != [other.get(value) for value in right.results]:
        yield where + "other values are returned"
    if _result_roles(left) != _result_roles(right):
        yield where + "the results have other roles"


def _positions(function: Function) -> Positions:
    return {value: position for position, value in enumerate(function.values())}


def _param_roles(function: Function) -> list[Role]:
    return [function.param_role(index) for index in range(len(function.params))]


def _result_roles(function: Function) -> list[Role]:
    return [function.result_role(index) for index in range(len(function.results))]


def _types(values: tuple[Value, ...]) -> list[object]:
    return [value.type for value in values]


def _equal_op(left: Op, one: Positions, right: Op, other: Positions) -> bool:
    return (
        left.name == right.name
        and left.loc == right.loc
        and _types(left.results) == _types(right.results)
        and equal_attrs(left.attrs, right.attrs)
        and _place(left.operands, one) == _place(right.operands, other)
    )


def _place(operand: Operand | tuple[Operand, ...], positions: Positions) -> object:
    """A value's position; an absent operand and a value that is defined nowhere are different things."""
    if isinstance(operand, tuple):
        return [_place(value, positions) for value in operand]
    return None if operand is None else positions.get(operand, -1)
