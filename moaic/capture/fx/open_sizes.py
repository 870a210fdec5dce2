"""Sizes of Dynamo's graphs, which are expressions over symbols, as sizes of the IR."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import reduce
from math import prod
from typing import Any, Final, cast

from torch import SymBool, SymFloat, SymInt, Tensor

from moaic.ir.polynomials import Terms, constant, plus, times
from moaic.ir.ratios import ratio_of
from moaic.ir.sizes import Size, pinned, terms_of

SymNumber = SymInt | SymFloat | SymBool

SymbolSizes = Mapping[Any, int]
"""The size that each symbol of the graph, as sympy has it, becomes; a plain number where it has no other."""


class DependsOnValues(Exception):
    """A size that is read from a tensor; the argument is its text."""


def number_of(symbolic: SymNumber, sizes: SymbolSizes) -> int | float | bool:
    """A symbolic number of a graph as a size, or as a plain number where it has the same value for all sizes.

    What sizes cannot express (roots, logarithms) holds for the sizes of the example alone. Raises DependsOnValues.
    """
    expression = cast("Any", symbolic).node.expr
    unknown = [symbol for symbol in cast("set[Any]", expression.free_symbols) if symbol not in sizes]
    if unknown:
        raise DependsOnValues(str(expression))
    if isinstance(symbolic, SymFloat):
        return _fraction(expression, sizes)
    if isinstance(symbolic, SymBool):
        return bool(_size(expression, sizes) if _is_size(expression, sizes) else _at_example(expression, sizes))
    return _size(expression, sizes)


def equal_sizes(examples: Iterable[Any], sizes: SymbolSizes) -> Iterator[tuple[Terms, Terms]]:
    """Pairs of sizes that are equal in every call of a graph with these arguments: Dynamo checks them beforehand."""
    symbolic = (each for value in examples for each in (value.shape if isinstance(value, Tensor) else (value,)))
    first = next((each for each in symbolic if isinstance(each, SymInt)), None)
    for guard in () if first is None else cast("Any", first).node.shape_env.guards:
        expression = guard.expr
        if type(expression).__name__ == "Equality" and all(_is_polynomial(each, sizes) for each in expression.args):
            one, other = (terms_of(_size(each, sizes)) for each in expression.args)
            yield one, other


def _is_polynomial(expression: Any, sizes: SymbolSizes) -> bool:
    kind = type(expression).__name__
    is_leaf = expression in sizes or expression.is_Integer
    return is_leaf or (kind in ("Add", "Mul") and all(_is_polynomial(each, sizes) for each in expression.args))


def _size(expression: Any, sizes: SymbolSizes) -> int:
    if expression in sizes:
        return sizes[expression]
    if expression.is_Integer or (expression.is_Boolean and not expression.args):
        return int(expression)
    if not _is_size(expression, sizes):
        return int(_at_example(expression, sizes))
    return _OPERATIONS[type(expression).__name__]([_size(each, sizes) for each in expression.args])


def _fraction(expression: Any, sizes: SymbolSizes) -> float:
    """A quotient of sizes; of the example alone if the expression is something else."""
    symbols = next((size.symbols for size in sizes.values() if isinstance(size, Size)), None)
    found = _rational(expression, sizes)
    if symbols is None or found is None:
        return float(_at_example(expression, sizes))
    return ratio_of(*found, symbols)


def _rational(expression: Any, sizes: SymbolSizes) -> tuple[Terms, Terms] | None:
    """Dividend and divisor of a rational function of sizes; None for any other expression."""
    if expression.is_number:
        number = Fraction(float(expression))
        return constant(number.numerator), constant(number.denominator)
    kind = type(expression).__name__
    if kind not in _RATIONAL:
        return (terms_of(_size(expression, sizes)), constant(1)) if _is_size(expression, sizes) else None
    parts = [_rational(each, sizes) for each in expression.args]
    if any(part is None for part in parts):
        return None
    return reduce(_RATIONAL[kind], cast("list[_Rational]", parts))


def _is_size(expression: Any, sizes: SymbolSizes) -> bool:
    """Whether an expression is arithmetic of whole numbers alone."""
    if expression in sizes or expression.is_Integer:
        return True
    is_power = type(expression).__name__ == "Pow"
    if type(expression).__name__ not in _OPERATIONS or (is_power and not expression.args[1].is_nonnegative):
        return False
    return all(_is_size(each, sizes) for each in expression.args)


_Rational = tuple[Terms, Terms]

_RATIONAL: Final[Mapping[str, Callable[[_Rational, _Rational], _Rational]]] = {
    "ToFloat": lambda one, _: one,
    "Add": lambda one, other: (
        plus(times(one[0], other[1]), times(other[0], one[1])),
        times(one[1], other[1]),
    ),
    "Mul": lambda one, other: (times(one[0], other[0]), times(one[1], other[1])),
    **dict.fromkeys(
        ("IntTrueDiv", "FloatTrueDiv"),
        lambda one, other: (times(one[0], other[1]), times(one[1], other[0])),
    ),
}
"""Arithmetic of rational functions, by the name of sympy's or PyTorch's class."""


def _at_example(expression: Any, sizes: SymbolSizes) -> Any:
    """The value of an expression for the sizes of the example, which the program then requires."""
    return expression.xreplace({symbol: pinned(sizes[symbol]) for symbol in expression.free_symbols})


def _folded(operation: Callable[[Any, Any], Any]) -> Callable[[Sequence[int]], int]:
    def fold(operands: Sequence[int]) -> int:
        first, second = operands
        return cast("int", operation(first, second))

    return fold


_OPERATIONS: Final[Mapping[str, Callable[[Sequence[int]], int]]] = {
    "Add": sum,
    "Mul": prod,
    "Pow": _folded(lambda base, exponent: base ** pinned(exponent)),
    "FloorDiv": _folded(lambda dividend, divisor: divmod(dividend, divisor)[0]),
    "CleanDiv": _folded(lambda dividend, divisor: divmod(dividend, divisor)[0]),
    "Mod": _folded(lambda dividend, divisor: divmod(dividend, divisor)[1]),
    "PythonMod": _folded(lambda dividend, divisor: divmod(dividend, divisor)[1]),
    "Max": max,
    "Min": min,
    "Equality": _folded(lambda one, other: (one - other) == 0),
    "Unequality": _folded(lambda one, other: (one - other) != 0),
    "StrictLessThan": _folded(lambda one, other: one < other),
    "LessThan": _folded(lambda one, other: one <= other),
    "StrictGreaterThan": _folded(lambda one, other: one > other),
    "GreaterThan": _folded(lambda one, other: one >= other),
}
"""By the name of sympy's or PyTorch's class."""
