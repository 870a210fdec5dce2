"""Polynomials over named whole numbers, as tuples that compare and hash by value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from math import lcm, prod

Names = tuple[str, ...]
"""The factors of a product, sorted."""

Coefficient = int | Fraction

Terms = tuple[tuple[Names, Coefficient], ...]
"""A polynomial: each term's product and coefficient, sorted; no coefficient is 0, and no Fraction a whole number."""


def constant(number: Coefficient) -> Terms:
    return (((), number),) if number else ()


def is_constant(terms: Terms) -> bool:
    return all(not names for names, _ in terms)


def plus(one: Terms, other: Terms) -> Terms:
    total = dict(one)
    for names, coefficient in other:
        total[names] = total.get(names, 0) + coefficient
    return _canonical(total)


def times(one: Terms, other: Terms) -> Terms:
    total: dict[Names, Coefficient] = {}
    for names, coefficient in one:
        for more, factor in other:
            key = tuple(sorted((*names, *more))) if names and more else names or more
            total[key] = total.get(key, 0) + coefficient * factor
    return _canonical(total)


def _canonical(total: Mapping[Names, Coefficient]) -> Terms:
    return tuple(sorted((names, _whole(coefficient)) for names, coefficient in total.items() if coefficient))


def rewritten(same: Mapping[Names, Terms], terms: Terms) -> Terms:
    """The polynomial with each product that is equal to another polynomial replaced by it."""
    for gone, other in same.items():
        while found := next((names for names, _ in terms if without(names, gone) is not None), None):
            rest = without(found, gone)
            assert rest is not None
            coefficient = dict(terms)[found]
            terms = plus(terms, ((found, -coefficient),))
            terms = plus(terms, times(other, ((rest, coefficient),)))
    return terms


def solved(difference: Terms) -> tuple[Names, Terms]:
    """The largest product of a polynomial that is 0, and what that product is then equal to."""
    lead, coefficient = max(difference, key=lambda term: (len(term[0]), term[0]))
    return lead, times(plus(difference, ((lead, -coefficient),)), constant(Fraction(-1) / coefficient))


def _whole(coefficient: Coefficient) -> Coefficient:
    return coefficient.numerator if coefficient.denominator == 1 else coefficient


def is_whole(terms: Terms) -> bool:
    return all(coefficient.denominator == 1 for _, coefficient in terms)


def quotient_of(terms: Terms, divisor: Terms) -> Terms | None:
    """The polynomial that times `divisor` is `terms`; None where there is none."""
    if not terms:
        return ()
    (gone, by), *more = divisor
    factor = Fraction(terms[0][1]) / by
    if times(divisor, (((), factor),)) == terms:
        return (((), _whole(factor)),)
    if more:
        return None
    quotient: dict[Names, Coefficient] = {}
    for names, coefficient in terms:
        rest = without(names, gone)
        if rest is None:
            return None
        quotient[rest] = coefficient / Fraction(by)
    return _canonical(quotient)


def without(names: Sequence[str], gone: Sequence[str]) -> Names | None:
    rest = list(names)
    for name in gone:
        if name not in rest:
            return None
        rest.remove(name)
    return tuple(rest)


def evaluated(terms: Terms, numbers: Mapping[str, int]) -> int:
    """The number of a polynomial, rounded down where these numbers do not meet its conditions."""
    shared = lcm(*(coefficient.denominator for _, coefficient in terms))
    total = 0
    for names, coefficient in terms:
        number = coefficient.numerator * (shared // coefficient.denominator)
        for name in names:
            number = number * numbers[name]
        total = total + number
    return total // shared if shared > 1 else total


def render_terms(terms: Terms) -> str:
    """`2*s0*s1 + 3*s0/4 - 8`: the constant last."""
    ordered = [each for each in terms if each[0]] + [each for each in terms if not each[0]]
    text = ""
    for names, coefficient in ordered:
        sign = ("-" if coefficient < 0 else "") if not text else (" - " if coefficient < 0 else " + ")
        text += sign + _render_term(names, abs(coefficient))
    return text or "0"


def _render_term(names: Sequence[str], coefficient: Coefficient) -> str:
    top, bottom = coefficient.numerator, coefficient.denominator
    factors = [*([str(top)] if top != 1 or not names else []), *names]
    return "*".join(factors) + (f"/{bottom}" if bottom > 1 else "")


def parse_terms(text: str) -> Terms:
    """The polynomial that `render_terms` prints as `text`."""
    terms: Terms = ()
    for sign, term in _signed(text):
        product, _, divisor = term.partition("/")
        factors = product.split("*")
        names = tuple(sorted(factor for factor in factors if not factor.isdigit()))
        number = prod(int(factor) for factor in factors if factor.isdigit())
        terms = plus(terms, ((names, _whole(Fraction(sign * number, int(divisor or 1)))),))
    return terms


def _signed(text: str) -> Iterable[tuple[int, str]]:
    for part in text.replace(" ", "").replace("-", "+-").split("+"):
        if part:
            yield (-1, part[1:]) if part.startswith("-") else (1, part)
