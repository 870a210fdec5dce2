"""The symbols of a program with open sizes, and the conditions under which the program is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from moaic.ir.polynomials import Names, Terms, evaluated, render_terms, rewritten

LEAST: Final = 2
"""The smallest number of a symbol: a dim of size 0 or 1 is never a symbol, as such dims follow rules of their own."""

Numbers = Mapping[str, int]
"""The number of each symbol of a program, quotients too."""

RELATIONS: Final[Mapping[str, Callable[[int, int], bool]]] = {
    "<": lambda number, _: number < 0,
    ">=": lambda number, _: number >= 0,
    "==": lambda number, _: number == 0,
    "!=": lambda number, _: number != 0,
    "divisible": lambda number, modulus: number % modulus == 0,
}


class Condition(NamedTuple):
    """What the number of a polynomial must be: a multiple of `modulus`, or less, not less, equal or unequal to 0."""

    terms: Terms
    relation: str
    modulus: int = 1

    def holds(self, numbers: Numbers) -> bool:
        return RELATIONS[self.relation](evaluated(self.terms, numbers), self.modulus)

    def __str__(self) -> str:
        if self.relation == "divisible":
            return f"{render_terms(self.terms)} is a multiple of {self.modulus}"
        return f"{render_terms(self.terms)} {self.relation} 0"


class Floor(NamedTuple):
    """A quotient, rounded down."""

    dividend: Terms
    divisor: int


class Symbols:
    """The symbols of one program, their numbers in the example, and the conditions under which it was made."""

    def __init__(self) -> None:
        self.example: dict[str, int] = {}
        """The number of each symbol in the example, in the order in which `numbers` takes them."""
        self.floors: dict[str, Floor] = {}
        """Symbols that stand for quotients."""
        self.conditions: dict[Condition, None] = {}
        self._same: dict[Names, Names] = {}
        self._checks: list[Callable[[Numbers], bool]] = []
        self._held: dict[tuple[int, ...], int] = {}
        """The strictness when the conditions were last found to hold, by numbers."""

    def numbers(self, given: Sequence[int]) -> dict[str, int]:
        """The number of each symbol, quotients too, where those in `example` have the numbers `given`."""
        numbers = dict(zip(self.example, given, strict=True))
        for name, floor in self.floors.items():
            numbers[name] = evaluated(floor.dividend, numbers) // floor.divisor
        return numbers

    def example_numbers(self) -> dict[str, int]:
        return self.numbers(tuple(self.example.values()))

    def least(self, name: str) -> int:
        return 0 if name in self.floors else LEAST

    # Equal products.

    def identify(self, one: Names, other: Names) -> None:
        """From now on two products of symbols, which are equal in every call, are equal sizes."""
        kept, gone = sorted((one, other), key=lambda names: (len(names), names))
        if kept != gone:
            self._same[gone] = kept

    def canonical(self, terms: Terms) -> Terms:
        """The polynomial with one of the products that are equal for all of them."""
        return rewritten(self._same, terms) if self._same else terms

    # Conditions.

    def require(self, condition: Condition) -> None:
        self.conditions[condition] = None

    def check(self, holds: Callable[[Numbers], bool]) -> None:
        """Require that `holds` is true of the numbers; for what no polynomial says."""
        self._checks.append(holds)

    @property
    def strictness(self) -> int:
        """A number that grows with each condition."""
        return len(self.conditions) + len(self._checks)

    def hold(self, given: Sequence[int]) -> bool:
        """Whether all conditions hold for these numbers."""
        key = tuple(given)
        if self._held.get(key) != self.strictness:
            if not self._tested(key):
                return False
            self._held[key] = self.strictness
        return True

    def broken(self, given: Sequence[int]) -> str:
        """The first condition that does not hold for these numbers; empty if none is a polynomial's."""
        for name, number in zip(self.example, given, strict=True):
            if number < LEAST <= self.example[name]:
                return f"{name} is at least {LEAST}"
        numbers = self.numbers(given)
        return next((str(each) for each in self.conditions if not each.holds(numbers)), "")

    def _tested(self, given: tuple[int, ...]) -> bool:
        example = tuple(self.example.values())
        if given == example:
            return True
        if any(number < LEAST <= usual for number, usual in zip(given, example, strict=True)):
            return False
        numbers = self.numbers(given)
        return all(each.holds(numbers) for each in self.conditions) and all(each(numbers) for each in self._checks)
