"""Open sizes compute and compare like numbers, wherever the conditions hold that they record."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, strategies

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Function, Module, Value
from moaic.ir.parser import parse
from moaic.ir.printer import render
from moaic.ir.ratios import Ratio, ratio
from moaic.ir.sizes import LEAST, Size, in_example, number_at, parse_size, pinned, symbol, terms_of, wholeness
from moaic.ir.specialize import require_whole, specialized, symbols_of
from moaic.ir.symbols import Symbols
from moaic.ir.types import TensorType
from moaic.ir.verify import verify

Formula = Callable[[int, int], int]

sizes = strategies.integers(LEAST, 40)
small = strategies.integers(-4, 9)


class Step(NamedTuple):
    """One step of a formula: what becomes of a value, by the sizes x and y and a number n."""

    kind: str
    n: int

    def of(self, value: int, x: int, y: int) -> int:
        n, some = self.n, abs(self.n) or 1
        match self.kind:
            case "add":
                return value + n
            case "subtract":
                return n - value
            case "multiply":
                return value * (n or 1)
            case "divide":
                return divmod(value, some)[0]
            case "remainder":
                return divmod(value, some)[1]
            case "add sizes":
                return value + x * n
            case "multiply sizes":
                return value * y
            case _:
                return -value if value < n else abs(value) if value > y else +value


KINDS = ["add", "subtract", "multiply", "divide", "remainder", "add sizes", "multiply sizes", "compare"]


@strategies.composite
def formulas(draw: strategies.DrawFn) -> Formula:
    """Arithmetic on two sizes, which any ints may take the place of."""
    steps = draw(strategies.lists(strategies.builds(Step, strategies.sampled_from(KINDS), small), max_size=6))

    def formula(x: int, y: int) -> int:
        value = x
        for step in steps:
            value = step.of(value, x, y)
        return value

    return formula


def two(x: int, y: int) -> tuple[Symbols, int, int]:
    symbols = Symbols()
    return symbols, symbol(symbols, "s0", x), symbol(symbols, "s1", y)


@given(formulas(), sizes, sizes, sizes, sizes)
def test_a_formula_is_right_wherever_its_conditions_hold(f: Formula, x: int, y: int, other: int, another: int) -> None:
    symbols, s0, s1 = two(x, y)
    made = f(s0, s1)
    assert in_example(made) == f(x, y)
    if (condition := wholeness(made)) is not None:
        symbols.require(condition)
    assert symbols.hold((x, y))
    if symbols.hold((other, another)):
        assert number_at(made, symbols.numbers((other, another))) == f(other, another)


@given(formulas(), formulas(), sizes, sizes, sizes, sizes)
def test_a_comparison_comes_out_alike_wherever_its_conditions_hold(
    f: Formula, g: Formula, x: int, y: int, other: int, another: int
) -> None:
    symbols, s0, s1 = two(x, y)
    answers = (f(s0, s1) < g(s0, s1), f(s0, s1) <= g(s0, s1), f(s0, s1) > 0, f(s0, s1) == 1, bool(g(s0, s1)))
    for made in (f(s0, s1), g(s0, s1)):
        if (condition := wholeness(made)) is not None:
            symbols.require(condition)
    if symbols.hold((other, another)):
        a, b = f(other, another), g(other, another)
        assert answers == (a < b, a <= b, a > 0, a == 1, bool(b))


@given(formulas(), sizes, sizes)
def test_a_size_prints_so_that_it_reads_back(f: Formula, x: int, y: int) -> None:
    symbols, s0, s1 = two(x, y)
    made = f(s0, s1)
    if isinstance(made, Size):
        read = parse_size(str(made), symbols)
        assert read == made
        assert in_example(read) == in_example(made)


def test_what_cannot_turn_out_otherwise_is_no_condition() -> None:
    symbols, s0, s1 = two(8, 6)
    assert s0 > 1
    assert s0 * s1 > s1
    assert s0 != 0
    assert 8 * s0 % 4 == 0
    assert s0 * s1 // s1 == s0
    assert s0 != s1
    assert s0 != 8
    assert not symbols.conditions


def test_what_can_is_one() -> None:
    symbols, s0, s1 = two(8, 6)
    assert s0 > 7
    assert s0 - 1 != 1
    assert s1 < s0
    assert pinned(s1) == 6
    assert list(map(str, symbols.conditions)) == ["-s0 + 7 < 0", "s0 - 2 != 0", "-s0 + s1 < 0", "s1 - 6 == 0"]
    assert symbols.hold((9, 6))
    assert not symbols.hold((7, 6))
    assert not symbols.hold((9, 5))
    assert not symbols.hold((1, 6))


def test_division_leaves_a_condition_where_its_result_is_used() -> None:
    symbols, s0, s1 = two(8, 6)
    assert s0 % 4 == 0
    assert not symbols.conditions
    text = "// moai 1\nsizes s0 = 8\nmesh [dp=4]\n\nfunc @f(%x: f32[s0{dp}]) -> (f32[s0{dp}]) {\n  return %x\n}\n"
    module = parse(text)
    verify(module)
    require_whole(module)
    found = symbols_of(module)
    assert found is not None
    assert "s0 is a multiple of 4" in map(str, found.conditions)
    assert s1 % 4 != 0


def test_products_that_are_equal_in_every_call_are_one_size() -> None:
    symbols, s0, s1 = two(8, 6)
    s2, s3 = symbol(symbols, "s2", 8), symbol(symbols, "s3", 6)
    symbols.identify(terms_of(s2 * s3), terms_of(s0 * s1))
    s2, s3 = parse_size("s2", symbols), parse_size("s3", symbols)
    assert s2 * s3 * 4 == 4 * s0 * s1
    assert hash(s2 * s3) == hash(s0 * s1)
    assert s2 * s3 // s3 == s2
    assert s0 != s2
    assert not symbols.conditions


def test_polynomials_that_are_equal_in_every_call_are_one_size() -> None:
    """Rows times length without the first token, of tokens and of labels."""
    symbols, s0, s1 = two(8, 6)
    s2, s3 = symbol(symbols, "s2", 8), symbol(symbols, "s3", 6)
    symbols.identify(terms_of(s2 * (s3 - 1)), terms_of(s0 * (s1 - 1)))
    assert s2 * (s3 - 1) * 4 == 4 * s0 * (s1 - 1)
    assert s2 * s3 != s0 * s1
    text = "// moai 1\nsizes s0 = 4, s1 = -3 where s0*s0 = 16\n\nfunc @f(%x: f32[s0*s0, s0]) -> (f32[s0*s0, s0]) {\n"
    text += "  return %x\n}\n"
    assert render(parse(text)) == text


def test_of_a_quotient_nothing_is_known() -> None:
    symbols, s0, _ = two(31, 6)
    quotient = divmod(s0 - 20, 2)[0]
    assert not quotient < 0
    assert symbols.hold((33, 6))
    assert not symbols.hold((9, 6))


PINNING: Sequence[Callable[[int], object]] = (
    lambda s: s & 1,
    lambda s: s << 1,
    lambda s: 2**s,
    round,
    lambda s: s < 9.5,
    lambda s: s < 8.5,
)


@pytest.mark.parametrize("pinning", PINNING)
def test_what_polynomials_do_not_say_pins_a_size(pinning: Callable[[int], object]) -> None:
    symbols, s0, _ = two(8, 6)
    pinning(s0)
    assert not symbols.hold((9, 6))


def test_a_number_below_the_least_is_no_symbol() -> None:
    symbols = Symbols()
    assert terms_of(symbol(symbols, "s0", 1)) == (((), 1),)
    assert symbols.hold((1,))
    assert not symbols.hold((2,))


def test_a_size_stays_in_its_process() -> None:
    _, s0, _ = two(8, 6)
    assert copy.deepcopy(s0) is s0
    with pytest.raises(TypeError, match="hand its text"):
        pickle.dumps(s0)
    assert f"{s0} rows" == "8 rows"


def test_a_ratio_follows_its_sizes_and_arithmetic_pins_it() -> None:
    symbols, s0, _ = two(8, 6)
    made = ratio(s0 * 4, s0 * 4 - 1)
    assert isinstance(made, Ratio)
    assert made.at(symbols.numbers((5, 6))) == 20 / 19
    assert str(made) == "ratio[4*s0, 4*s0 - 1]"
    assert not symbols.conditions
    assert 1.0 - made == 1.0 - 32 / 31
    assert not symbols.hold((5, 6))


TEXT = """// moai 1
sizes s0 = 8, s1 = 6, q0 = floor(s0 + 3, 2)
mesh [dp=2]

func @step(%x: f32[s0{dp}, s1, 4] input "x") -> (f32[s0{dp}, 4*s1] output "y", f32[q0]) {
  %v = aten.view %x {size = [s0, 4*s1]} : f32[s0{dp}, 4*s1]
  %m = aten.mul.Tensor %v, _ {other = ratio[s0*s1, s0*s1 - 1]} : f32[s0{dp}, 4*s1]
  %z = aten.full {size = [q0], fill_value = s1, dtype = "f32"} : f32[q0]
  return %m, %z
}
"""


def test_a_module_with_open_sizes_reads_back() -> None:
    module = parse(TEXT)
    verify(module)
    assert render(module) == TEXT
    symbols = symbols_of(module)
    assert symbols is not None
    at = render(specialized(module, symbols.numbers((4, 3))))
    assert "sizes" not in at
    assert "%m = aten.mul.Tensor %v, _ {other = 1.0909090909090908} : f32[4{dp}, 12]" in at
    assert "%z = aten.full {size = [3], fill_value = 3" in at
    assert render(specialized(module, symbols.example_numbers())) != TEXT


MISTAKES = [
    ("%x: f32[s0{dp}", "%x: f32[s7{dp}", "`s7` is no size of this file", "there are `s0`, `s1`, `q0`"),
    ("size = [s0, 4*s1]", "size = [s9, 4]", "`s9` is no size of this file", "there are `s0`, `s1`, `q0`"),
    ("s1 = 6", "s0 = 6", "size `s0` is defined twice", ""),
    (
        "sizes s0 = 8, s1 = 6, q0 = floor(s0 + 3, 2)\n",
        "",
        "`s0` is no size of this file",
        "write for example `sizes s0 = 8`",
    ),
    ("s1 = 6", "s1 = six", "expected", ""),
]


@pytest.mark.parametrize(("old", "new", "message", "hint"), MISTAKES)
def test_a_mistake_in_a_size_is_shown_where_it_stands(old: str, new: str, message: str, hint: str) -> None:
    with pytest.raises(Diagnostic) as caught:
        parse(TEXT.replace(old, new, 1))
    assert message in str(caught.value)
    assert hint in str(caught.value)


def test_two_programs_have_sizes_of_their_own() -> None:
    one, other = (parse(TEXT).main.params[0].type for _ in range(2))
    assert one != other
    assert one == TensorType("f32", one.shape, one.layout)
    assert symbols_of(Module((Function("f", (Value(TensorType("f32", (8,))),), (), ()),))) is None
