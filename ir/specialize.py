"""A program with open sizes at the numbers of one call: the same program, with plain numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, cast

from moaic.ir.graph import Attr, Function, Module, Op, Operand, Value
from moaic.ir.layout import Layout, Mesh
from moaic.ir.ratios import Ratio
from moaic.ir.sizes import Size, number_at, wholeness
from moaic.ir.symbols import Numbers, Symbols
from moaic.ir.types import TensorType


def symbols_of(module: Module) -> Symbols | None:
    """The symbols of the sizes in `module`; None if all sizes are numbers."""
    sizes = (size for function in module.functions for size in sizes_of(function))
    return next((size.symbols for size in sizes), None)


def sizes_of(function: Function) -> Iterator[Size]:
    """The open sizes in the types and attributes of a function."""
    for value in function.values():
        yield from _sizes_in(value.type.shape)
    for op in function.ops:
        yield from _attr_sizes(op)


def _attr_sizes(op: Op) -> Iterator[Size]:
    for attr in op.attrs.values():
        yield from _sizes_in(attr)


def _sizes_in(attr: Attr) -> Iterator[Size]:
    if isinstance(attr, Size):
        yield attr
    elif isinstance(attr, Ratio):
        yield from _sizes_in((attr.dividend, attr.divisor))
    elif isinstance(attr, tuple):
        for each in attr:
            yield from _sizes_in(each)


def require_whole(module: Module) -> None:
    """Makes it a condition of the symbols that all sizes of `module`, and all parts of its values, are whole."""
    symbols = symbols_of(module)
    if symbols is None:
        return
    types = {value.type for function in module.functions for value in function.values()}
    sizes = [size for type_ in types for size in _type_sizes(type_, module.mesh)]
    attrs = [size for function in module.functions for op in function.ops for size in _attr_sizes(op)]
    for size in {*sizes, *attrs}:
        if (condition := wholeness(size)) is not None:
            symbols.require(condition)


def _type_sizes(type_: TensorType, mesh: Mesh) -> Iterator[int]:
    """The sizes and strides of a type, of one rank's part, and of what each split leaves outside its stride."""
    yield from type_.shape
    yield from type_.local_shape(mesh)
    for split in type_.layout.splits:
        yield split.stride
        yield type_.shape[split.dim] // (split.stride * mesh.size(split.axis))


def specialized(module: Module, numbers: Numbers) -> Module:
    """`module` where the symbols have these numbers; it need not be well formed where they break a condition."""
    specialize = Specializer(numbers)
    return replace(module, functions=tuple(map(specialize.function, module.functions)))


def in_example(module: Module) -> Module:
    """`module` at the sizes of the example."""
    symbols = symbols_of(module)
    return module if symbols is None else specialized(module, symbols.example_numbers())


class Specializer:
    """Replaces sizes by their numbers, each distinct type once."""

    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers
        self._types: dict[TensorType, TensorType] = {}
        self._values: dict[Value, Value] = {}

    def function(self, function: Function) -> Function:
        return replace(
            function,
            params=tuple(map(self.value, function.params)),
            ops=self.ops(function.ops),
            results=tuple(map(self.value, function.results)),
        )

    def ops(self, ops: Iterable[Op]) -> tuple[Op, ...]:
        return tuple(map(self._op, ops))

    def value(self, value: Value) -> Value:
        found = self._values.get(value)
        if found is None:
            found = self._values[value] = Value(self.type(value.type), value.name)
        return found

    def _op(self, op: Op) -> Op:
        attrs = {name: self.attr(value) for name, value in op.attrs.items()}
        return Op(op.name, tuple(map(self._operand, op.operands)), tuple(map(self.value, op.results)), attrs, op.loc)

    def _operand(self, operand: Operand) -> Operand:
        if isinstance(operand, tuple):
            return tuple(None if value is None else self.value(value) for value in operand)
        return None if operand is None else self.value(operand)

    def attr(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(self.attr, cast("tuple[Attr, ...]", value)))
        if isinstance(value, Ratio):
            return value.at(self.numbers)
        return number_at(value, self.numbers) if isinstance(value, Size) else value

    def type(self, type_: TensorType) -> TensorType:
        found = self._types.get(type_)
        if found is None:
            shape = tuple(number_at(size, self.numbers) for size in type_.shape)
            found = self._types[type_] = TensorType(type_.dtype, shape, self.layout(type_.layout))
        return found

    def layout(self, layout: Layout) -> Layout:
        if not layout.splits:
            return layout
        splits = tuple(replace(split, stride=number_at(split.stride, self.numbers)) for split in layout.splits)
        return Layout(splits, layout.partial, layout.owner)
