"""Patterns of ops: what a value is made of, casts aside.

Kernels compute in float32 and round once, so where a graph casts on the way makes no difference to what a kernel
stands for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

from moaic.ir.graph import Attr, Function, Op, Operand, Value
from moaic.ir.types import FLOATING

CAST: Final = "aten._to_copy"
VIEW: Final = "aten.view"
SYMMETRIC: Final = frozenset({"aten.add.Tensor", "aten.mul.Tensor"})


@dataclass(frozen=True, slots=True)
class AnyPattern:
    """Any value, the same wherever the name stands; or any attribute."""

    name: str


@dataclass(frozen=True, slots=True)
class OpPattern:
    """A result of an op, with operands (None for an absent one) and attributes like these and no others."""

    op: str
    operands: tuple[PatternOperand, ...]
    attrs: Mapping[str, Attr | AnyPattern]
    name: str = ""
    """What the value is remembered under."""
    views: bool = False
    """Whether it may be seen in other shapes of the same elements."""


Pattern = AnyPattern | OpPattern
PatternOperand = Pattern | tuple[Pattern, ...] | None
"""An operand, which may be a list."""


def made(
    op: str, *operands: PatternOperand, name: str = "", views: bool = False, **attrs: Attr | AnyPattern
) -> OpPattern:
    return OpPattern(op, operands, attrs, name, views)


@dataclass(frozen=True, slots=True)
class Found:
    """What the names of a pattern stand for."""

    values: Mapping[str, Value] = field(default_factory=dict[str, Value])
    attrs: Mapping[str, Attr] = field(default_factory=dict[str, Attr])

    def __getitem__(self, name: str) -> Value:
        return self.values[name]


@dataclass(frozen=True)
class Sight:
    """A function, and who makes and who reads each of its values."""

    function: Function

    @cached_property
    def makers(self) -> Mapping[Value, Op]:
        return {result: op for op in self.function.ops for result in op.results}

    @cached_property
    def readers(self) -> Mapping[Value, Sequence[Op]]:
        found: dict[Value, list[Op]] = defaultdict(list)
        for op in self.function.ops:
            for value in dict.fromkeys(op.inputs()):
                found[value].append(op)
        return found

    def before(self, value: Value, *kinds: str) -> Value:
        """What the value was before ops of these kinds; casts from or to whole numbers are none."""
        while (op := self.makers.get(value)) is not None and op.name in kinds and _keeps_numbers(op):
            (value,) = op.inputs()
        return value

    def same(self, one: Value, other: Value) -> bool:
        """Whether two values have the same elements in the same order, casts aside."""
        roots = {self.before(each, CAST, VIEW) for each in (one, other)}
        return one.type.elements() == other.type.elements() and len(roots) == 1

    def matches(self, pattern: Pattern, value: Value, found: Found | None = None) -> Iterator[Found]:
        """Each way in which the value is made as the pattern says."""
        found = found or Found()
        if isinstance(pattern, AnyPattern):
            yield from self._named(pattern.name, value, found)
            return
        value = self.before(value, CAST, VIEW) if pattern.views else self.before(value, CAST)
        op = self.makers.get(value)
        if op is None or op.name != pattern.op or len(op.operands) != len(pattern.operands):
            return
        orders = (op.operands, op.operands[::-1]) if op.name in SYMMETRIC else (op.operands,)
        for known in _with_attrs(pattern, op, found):
            for named in self._named(pattern.name, value, known):
                for operands in orders:
                    yield from self._operands(pattern.operands, operands, named)

    def _named(self, name: str, value: Value, found: Found) -> Iterator[Found]:
        known = found.values.get(name)
        if not name or (known is not None and self.same(known, value)):
            yield found
        elif known is None:
            yield replace(found, values={**found.values, name: value})

    def _operands(
        self, patterns: Sequence[PatternOperand], operands: Sequence[Operand], found: Found
    ) -> Iterator[Found]:
        if not patterns:
            yield found
            return
        (pattern, *others), (operand, *rest) = patterns, operands
        if pattern is None and operand is None:
            yield from self._operands(others, rest, found)
        elif isinstance(pattern, tuple):
            if isinstance(operand, tuple) and len(operand) == len(pattern):
                yield from self._operands([*pattern, *others], [*operand, *rest], found)
        elif pattern is not None and isinstance(operand, Value):
            for each in self.matches(pattern, operand, found):
                yield from self._operands(others, rest, each)


def _keeps_numbers(op: Op) -> bool:
    (before,), (after,) = op.inputs(), op.results
    return before.type.dtype == after.type.dtype or {before.type.dtype, after.type.dtype} <= FLOATING


def _with_attrs(pattern: OpPattern, op: Op, found: Found) -> Iterator[Found]:
    """An element type may be said anywhere: casts are left aside."""
    new = dict(found.attrs)
    if {*op.attrs} - {"dtype"} != {*pattern.attrs}:
        return
    for name, wanted in pattern.attrs.items():
        expected = new.setdefault(wanted.name, op.attrs[name]) if isinstance(wanted, AnyPattern) else wanted
        if expected != op.attrs[name]:
            return
    yield replace(found, attrs=new)
