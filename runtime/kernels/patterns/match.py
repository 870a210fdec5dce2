"""Patterns that match the ops by which a value is computed, without regard to casts.

Kernels compute in float32 and round once, so casts between the ops of a pattern do not matter:

    %y = aten.mul.Tensor(%g, aten.sigmoid(%g))
  is matched by
    result_of("aten.mul.Tensor", AnyPattern("gate"), result_of("aten.sigmoid", AnyPattern("gate")))
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
    """Any value or attribute; all occurrences of one name must be equal."""

    name: str


@dataclass(frozen=True, slots=True)
class OpPattern:
    """A result of an op with exactly these operands (None for an absent one) and attributes."""

    op: str
    operands: tuple[PatternOperand, ...]
    attrs: Mapping[str, Attr | AnyPattern]
    name: str = ""
    """The name to which the value is bound, if any."""
    views: bool = False
    """Whether views of the value match, too."""


Pattern = AnyPattern | OpPattern
PatternOperand = Pattern | tuple[Pattern, ...] | None
"""An operand, which may be a list."""


def result_of(
    op: str, *operands: PatternOperand, name: str = "", views: bool = False, **attrs: Attr | AnyPattern
) -> OpPattern:
    return OpPattern(op, operands, attrs, name, views)


@dataclass(frozen=True, slots=True)
class Match:
    """The values and attributes bound to the names of a pattern."""

    values: Mapping[str, Value] = field(default_factory=dict[str, Value])
    attrs: Mapping[str, Attr] = field(default_factory=dict[str, Attr])

    def __getitem__(self, name: str) -> Value:
        return self.values[name]


@dataclass(frozen=True)
class DefUse:
    """A function with the maker and the readers of each of its values."""

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
        """The value before ops of these names; casts from or to integer types end the chain."""
        while (op := self.makers.get(value)) is not None and op.name in kinds and _keeps_numbers(op):
            (value,) = op.inputs()
        return value

    def same(self, one: Value, other: Value) -> bool:
        """Whether two values have the same elements in the same order, except for casts."""
        roots = {self.before(each, CAST, VIEW) for each in (one, other)}
        return one.type.elements() == other.type.elements() and len(roots) == 1

    def matches(self, pattern: Pattern, value: Value, found: Match | None = None) -> Iterator[Match]:
        """Yield each match of the pattern with the value, which extends `found`."""
        found = found or Match()
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

    def _named(self, name: str, value: Value, found: Match) -> Iterator[Match]:
        known = found.values.get(name)
        if not name or (known is not None and self.same(known, value)):
            yield found
        elif known is None:
            yield replace(found, values={**found.values, name: value})

    def _operands(
        self, patterns: Sequence[PatternOperand], operands: Sequence[Operand], found: Match
    ) -> Iterator[Match]:
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


def _with_attrs(pattern: OpPattern, op: Op, found: Match) -> Iterator[Match]:
    """Yield the match extended by the op's attributes, if they match; `dtype` is ignored, as casts are."""
    new = dict(found.attrs)
    if {*op.attrs} - {"dtype"} != {*pattern.attrs}:
        return
    for name, wanted in pattern.attrs.items():
        expected = new.setdefault(wanted.name, op.attrs[name]) if isinstance(wanted, AnyPattern) else wanted
        if expected != op.attrs[name]:
            return
    yield replace(found, attrs=new)
