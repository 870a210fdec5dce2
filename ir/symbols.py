"""The symbols of a program with open sizes, and the conditions under which the program is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from moaic.ir.polynomials import (
    Names,
    Terms,
    constant,
    evaluated,
    is_constant,
    plus,
    render_terms,
    rewritten,
    solved,
    times,
)

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
        self.same: dict[Names, Terms] = {}
        """Products that are equal to other polynomials in every call."""
        self.is_given_up = False
        """Whether nothing is made of the program any more: its sizes are equal in ways that no polynomial says."""
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

    # Equal polynomials.

    def identify(self, one: Terms, other: Terms) -> None:
        """From now on two polynomials, which are equal in every call, are equal sizes."""
        difference = self.canonical(plus(one, times(other, constant(-1))))
        if not is_constant(difference):
            gone, kept = solved(difference)
            self.same[gone] = kept

    def canonical(self, terms: Terms) -> Terms:
        """The polynomial that stands for all that are equal to this one."""
        return rewritten(self.same, terms) if self.same else terms

    # Conditions.

    def require(self, condition: Condition) -> None:
        self.conditions[condition] = None

    def check(self, holds: Callable[[Numbers], bool]) -> None:
        """Require that `holds` is true of the numbers; for what no polynomial says."""
        self._checks.append(holds)

    @property
    def strictness(self) -> int:
        """A number that grows with each condition."""
        return len(self.conditions) + len(self._checks) + self.is_given_up

    def hold(self, given: Sequence[int]) -> bool:
        """Whether all conditions hold for these numbers."""
        if self.is_given_up:
            return False
        key = tuple(given)
        if self._held.get(key) != self.strictness:
            if not self._tested(key):
                return False
            self._held[key] = self.strictness
        return True

    def broken(self, given: Sequence[int]) -> str:
        """The first condition on polynomials that does not hold for these numbers; empty if all hold."""
        for name, number in zip(self.example, given, strict=True):
            if number < LEAST <= self.example[name]:
                return f"{name} is at least {LEAST}"
        numbers = self.numbers(given)
        return next((str(each) for each in self.conditions if not each.holds(numbers)), "")

    def _tested(self, given: tuple[int, ...]) -> bool:
        if given == tuple(self.example.values()):
            return True
        return not self.broken(given) and all(each(self.numbers(given)) for each in self._checks)
