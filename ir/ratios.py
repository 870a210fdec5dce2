"""Numbers of a program that are quotients of open sizes, such as the factor of an unbiased variance."""

from __future__ import annotations

from fractions import Fraction
from math import gcd, lcm
from typing import Any

from moaic.ir.polynomials import Terms, constant, times
from moaic.ir.sizes import Size, number_at, pin_operations, pinned, size_of
from moaic.ir.symbols import Numbers, Symbols


class Ratio(float):
    """The quotient of two sizes: a float, its number in the example.

    Arithmetic gives a plain float, under the condition that both sizes have the numbers of the example.
    """

    dividend: int
    divisor: int

    def __str__(self) -> str:
        return f"ratio[{self.dividend!s}, {self.divisor!s}]"

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ratio) and (self.dividend, self.divisor) == (other.dividend, other.divisor)

    def __hash__(self) -> int:
        return hash((self.dividend, self.divisor))

    def __deepcopy__(self, memo: Any) -> Ratio:
        return self

    def at(self, numbers: Numbers) -> float:
        """The quotient where the symbols have these numbers."""
        return number_at(self.dividend, numbers) / number_at(self.divisor, numbers)


def ratio(dividend: int, divisor: int) -> float:
    """The quotient of two sizes; a plain float if neither is open."""
    if not isinstance(dividend, Size) and not isinstance(divisor, Size):
        return dividend / divisor
    made = Ratio(dividend / divisor)
    made.dividend, made.divisor = dividend, divisor
    return made


def ratio_of(dividend: Terms, divisor: Terms, symbols: Symbols) -> float:
    """The quotient of two polynomials, as one of sizes without a common factor that is a number."""
    coefficients = [Fraction(coefficient) for terms in (dividend, divisor) for _, coefficient in terms]
    shared = lcm(*(each.denominator for each in coefficients))
    factor = constant(Fraction(shared, gcd(*(int(each * shared) for each in coefficients)) or 1))
    return ratio(*(size_of(times(terms, factor), symbols) for terms in (dividend, divisor)))


def _pinned(number: Ratio) -> float:
    return pinned(number.dividend) / pinned(number.divisor)


pin_operations(
    Ratio,
    _pinned,
    """add sub mul truediv floordiv mod pow radd rsub rmul rtruediv rfloordiv rmod rpow
    neg abs float int bool lt le gt ge""",
)
