"""Sizes that are open: polynomials over symbols, each with the number that it has in an example.

A `Size` is an int, its number in the example, so all code that handles sizes runs on it as it is. Arithmetic keeps the
polynomial. A comparison that other numbers would turn the other way becomes a condition of the symbols: what was made
under these conditions is right for every set of numbers that meets them.

    s0 = symbol(Symbols(), "s0", 37)        # 37 in the example
    8 * s0 // 4                             # 2*s0, 74 in the example
    s0 < 64                                 # True; under the condition that s0 - 64 is below 0
    s0 == 37                                # False: equal sizes are equal polynomials

Lists, ranges and C code see the example's number alone: no text may depend on what they make of a size.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import lcm, prod
from typing import Any, Final

from moaic.ir.polynomials import (
    Terms,
    constant,
    evaluated,
    is_constant,
    is_whole,
    parse_terms,
    plus,
    quotient_of,
    render_terms,
    times,
    without,
)
from moaic.ir.symbols import LEAST, RELATIONS, Condition, Floor, Numbers, Symbols

_OPPOSITE: Final = {"<": ">=", ">=": "<", "==": "!=", "!=": "=="}


class Size(int):
    """An open size. Made by `symbol`, `parse_size` and arithmetic; a size that is constant is a plain int."""

    terms: Terms
    key: Terms
    """What equal sizes have in common."""
    symbols: Symbols

    def __str__(self) -> str:
        return render_terms(self.terms)

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        """The number in the example: messages are about the user's tensors."""
        return format(self.example, spec)

    def __reduce__(self) -> Any:
        raise TypeError("a size belongs to its program: hand its text to other processes")

    def __deepcopy__(self, memo: Any) -> Size:
        return self

    @property
    def example(self) -> int:
        """The number in the example, without a condition."""
        return int.__add__(self, 0)

    # Arithmetic.

    def __neg__(self) -> int:
        return self * -1

    def __pos__(self) -> int:
        return self

    def __add__(self, other: Any) -> int:
        if not isinstance(other, int):
            return NotImplemented
        return _size(plus(self.terms, terms_of(other)), int.__add__(self, other), self.symbols)

    def __sub__(self, other: Any) -> int:
        return self + other * -1 if isinstance(other, int) else NotImplemented

    def __rsub__(self, other: Any) -> int:
        return self * -1 + other if isinstance(other, int) else NotImplemented

    def __mul__(self, other: Any) -> int:
        if not isinstance(other, int):
            return NotImplemented
        return _size(times(self.terms, terms_of(other)), int.__mul__(self, other), self.symbols)

    __radd__, __rmul__ = __add__, __mul__

    def __pow__(self, exponent: int, modulo: None = None) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        return prod([self] * pinned(exponent))

    def __abs__(self) -> int:
        return self if self >= 0 else -self

    def __mod__(self, other: Any) -> int:
        """The remainder in the example, 0 only for a multiple as a polynomial; without a condition.

        Whether a size can be divided decides what is made, not whether it is right: `wholeness` tells, in the end, what
        has to be whole.
        """
        if not isinstance(other, int):
            return NotImplemented
        quotient = self._over(other)
        if quotient is None or is_constant(quotient):
            # No multiple for all numbers: code that asks does without the division.
            return int(quotient is None or not is_whole(quotient))
        return int.__mod__(self, other)

    def __rmod__(self, other: Any) -> int:
        return min(other, 1)

    def __floordiv__(self, other: Any) -> int:
        """The polynomial where the example has a multiple, else a symbol of its own; without a condition, as `%`.

        A program of whose sizes it is one requires that it is whole. `divmod` requires it at once.
        """
        if not isinstance(other, int):
            return NotImplemented
        if not self % other:
            return _size(self._over(other) or (), int.__floordiv__(self, other), self.symbols)
        return pinned(self) // pinned(other) if isinstance(other, Size) else _floor(self, other)

    def __rfloordiv__(self, other: Any) -> int:
        return int.__floordiv__(other, pinned(self))

    def __divmod__(self, other: Any) -> tuple[int, int]:
        """Quotient and remainder, of which each is a number to compute with."""
        quotient = self // other
        # A quotient that is whole in the example alone would leave no trace in a remainder of 0.
        if (condition := wholeness(quotient)) is not None:
            self.symbols.require(condition)
        return quotient, self - quotient * other

    def __truediv__(self, other: Any) -> float:
        """For estimates: the quotient in the example, without a condition."""
        return self.example / other

    def __rtruediv__(self, other: Any) -> float:
        return other / self.example

    def __int__(self) -> int:
        return pinned(self)

    def __float__(self) -> float:
        return float(pinned(self))

    def _over(self, other: int) -> Terms | None:
        """The polynomial that times `other` is this one; None where there is none."""
        quotient = quotient_of(self.terms, terms_of(other))
        return quotient_of(self.key, other.key) if quotient is None and isinstance(other, Size) else quotient

    # Comparisons.

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Size):
            return self.symbols is other.symbols and self.key == other.key
        # Sizes 0 and 1 follow rules of their own; no other number does.
        return isinstance(other, int) and other in (0, 1) and self._compares("==", self - other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.key)

    def __bool__(self) -> bool:
        return self != 0

    def __lt__(self, other: float) -> bool:
        return self._compares("<", self - other) if isinstance(other, int) else pinned(self) < other

    def __ge__(self, other: float) -> bool:
        return self._compares(">=", self - other) if isinstance(other, int) else pinned(self) >= other

    def __gt__(self, other: float) -> bool:
        return self._compares("<", (self - other) * -1) if isinstance(other, int) else pinned(self) > other

    def __le__(self, other: float) -> bool:
        return self._compares(">=", (self - other) * -1) if isinstance(other, int) else pinned(self) <= other

    def _compares(self, relation: str, difference: int) -> bool:
        """Whether a difference compares with 0; a condition if other numbers may compare in another way."""
        answer = RELATIONS[relation](in_example(difference), 1)
        if isinstance(difference, Size) and not _is_settled(difference, relation, answer=answer):
            self.symbols.require(Condition(difference.terms, relation if answer else _OPPOSITE[relation]))
        return answer


def symbol(symbols: Symbols, name: str, example: int) -> int:
    """A new symbol; below LEAST the plain number `example`, of which it then has no other."""
    symbols.example[name] = example
    size = _open((((name,), 1),), example, symbols)
    return size if example >= LEAST else pinned(size)


def floor_symbol(symbols: Symbols, name: str, dividend: int, divisor: int) -> int:
    """A new symbol for a quotient, rounded down."""
    symbols.floors[name] = Floor(terms_of(dividend), divisor)
    return _open((((name,), 1),), in_example(dividend) // divisor, symbols)


def _floor(dividend: Size, divisor: int) -> int:
    floors = dividend.symbols.floors
    found = next((name for name, floor in floors.items() if floor == Floor(dividend.terms, divisor)), None)
    return floor_symbol(dividend.symbols, found or f"q{len(floors)}", dividend, divisor)


def _size(terms: Terms, number: int, symbols: Symbols) -> int:
    return number if is_constant(terms) else _open(terms, number, symbols)


def _open(terms: Terms, number: int, symbols: Symbols) -> Size:
    made = Size(number)
    made.terms, made.key, made.symbols = terms, symbols.canonical(terms), symbols
    return made


def size_of(terms: Terms, symbols: Symbols) -> int:
    """The size that is a polynomial. Raises KeyError for a name that is no symbol."""
    return _size(terms, evaluated(terms, symbols.example_numbers()), symbols)


def parse_size(text: str, symbols: Symbols) -> int:
    """The size that prints as `text`. Raises KeyError for a name that is no symbol."""
    return size_of(parse_terms(text), symbols)


def pinned(size: int) -> int:
    """The number of `size` in the example, under the condition that it has no other."""
    if not isinstance(size, Size):
        return size
    size.symbols.require(Condition(plus(size.terms, constant(-size.example)), "=="))
    return size.example


def terms_of(size: int) -> Terms:
    return size.terms if isinstance(size, Size) else constant(int(size))


def in_example(size: int) -> int:
    """The number of `size` in the example, without a condition: for estimates."""
    return size.example if isinstance(size, Size) else size


def number_at(size: int, numbers: Numbers) -> int:
    """The number of `size` where the symbols have these numbers."""
    return evaluated(size.terms, numbers) if isinstance(size, Size) else size


def wholeness(size: int) -> Condition | None:
    """The condition under which an open size is a whole number; None if it always is."""
    if not isinstance(size, Size) or is_whole(size.terms):
        return None
    modulus = lcm(*(coefficient.denominator for _, coefficient in size.terms))
    return Condition(times(size.terms, constant(modulus)), "divisible", modulus)


def _is_settled(difference: Size, relation: str, *, answer: bool) -> bool:
    """Whether a comparison with 0 comes out alike for all numbers of the symbols; of quotients nothing is known."""
    terms = _without_common(difference)
    names = {name for product, _ in terms for name in product}
    signs = [coefficient > 0 for product, coefficient in terms if product]
    if (any(signs) and not all(signs)) or not names.isdisjoint(difference.symbols.floors):
        return False
    bound = sum(Fraction(coefficient) * LEAST ** len(product) for product, coefficient in terms)
    grows = all(signs)
    if relation in ("==", "!="):
        return answer == (relation == "!=") and (bound > 0 if grows else bound < 0)
    return bound >= 0 if grows else bound < 0


def _without_common(size: Size) -> Terms:
    """The polynomial without the symbols, all above 0, that are factors of all its terms: it has the same sign."""
    terms = size.terms
    for name in terms[0][0] if len(terms) > 1 else ():
        if name not in size.symbols.floors and all(without(names, (name,)) is not None for names, _ in terms):
            terms = quotient_of(terms, (((name,), 1),)) or terms
    return terms


def pin_operations(kind: type, plain: Callable[[Any], Any], names: str) -> None:
    """Gives a kind of number these operations of the number that it derives from, on its `plain` number."""

    def pinning(operation: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any, *others: Any) -> Any:
            return operation(plain(self), *others)

        return method

    for name in names.split():
        setattr(kind, f"__{name}__", pinning(getattr(kind.__base__, f"__{name}__")))


pin_operations(Size, pinned, "and or xor lshift rshift round invert rand ror rxor rlshift rrshift rpow")
