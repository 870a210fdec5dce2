"""The syntax of the IR's text: parses it by the grammar beside this file into raw tuples of tokens.

Names and types are looked up later, by `ir/parser.py`. The messages of syntax errors are made here, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from lark import Lark, Token, Transformer
from lark.exceptions import UnexpectedInput, UnexpectedToken


class RawOp(NamedTuple):
    targets: list[Token]
    name: Token
    callee: Token | None
    operands: list[Token | list[Token]]
    attrs: Token | None
    types: list[Token]
    location: list[Token]


class RawRole(NamedTuple):
    kind: Token | None = None
    label: Token | None = None


class RawFunction(NamedTuple):
    name: Token
    params: list[tuple[Token, Token, RawRole]]
    outcomes: list[tuple[Token, RawRole]]
    ops: list[RawOp]
    returned: list[Token]


class RawSymbol(NamedTuple):
    """A symbol and its number in the example, or the quotient that it stands for: a size and a number."""

    name: Token
    number: Token
    divisor: Token | None = None


class RawEquality(NamedTuple):
    one: Token
    other: Token


class RawSizes(NamedTuple):
    symbols: tuple[RawSymbol, ...] = ()
    equalities: tuple[RawEquality, ...] = ()


class RawModule(NamedTuple):
    sizes: RawSizes
    axes: list[tuple[Token, Token]]
    schedule: RawSchedule
    functions: list[RawFunction]


class RawSchedule(NamedTuple):
    rows: tuple[Token, ...] = ()


class RawSplit(NamedTuple):
    axis: Token
    stride: Token | None = None


class RawDim(NamedTuple):
    size: Token
    splits: list[RawSplit]


class RawTensor(NamedTuple):
    dtype: Token
    dims: list[RawDim]
    partial: list[Token]
    owner: list[tuple[Token, Token]]


class RawComplex(NamedTuple):
    word: Token
    real: Token
    imaginary: Token


class RawRatio(NamedTuple):
    word: Token
    dividend: Token
    divisor: Token


RawAttr = Token | RawComplex | RawRatio | list["RawAttr"]


class _Shapes(Transformer[Token, Any]):
    """Turns each rule of the grammar into a raw tuple as it is reduced, so that no tree is built."""

    def module(self, found: list[Any]) -> RawModule:
        functions = [each for each in found if isinstance(each, RawFunction)]
        sizes = next((each for each in found if isinstance(each, RawSizes)), RawSizes())
        lists = [cast("list[tuple[Token, Token]]", each) for each in found if isinstance(each, list)]
        schedule = next((each for each in found if isinstance(each, RawSchedule)), RawSchedule())
        return RawModule(sizes, lists[0] if lists else [], schedule, functions)

    def sizes(self, found: list[Any]) -> RawSizes:
        symbols = tuple(each for each in found if isinstance(each, RawSymbol))
        return RawSizes(symbols, tuple(each for each in found if isinstance(each, RawEquality)))

    def symbol(self, found: list[Any]) -> RawSymbol:
        return RawSymbol(*found)

    def equality(self, found: list[Any]) -> RawEquality:
        return RawEquality(*found)

    def schedule(self, found: list[Any]) -> RawSchedule:
        return RawSchedule(tuple(found))

    def function(self, found: list[Any]) -> RawFunction:
        name, params, outcomes, *ops, returned = found
        return RawFunction(name, params, outcomes, ops, returned)

    def op(self, found: list[Any]) -> RawOp:
        if found[1].type != "CALL":
            found.insert(2, None)
        if len(found) == 6:
            found.insert(4, None)
        return RawOp(*found)

    def role(self, found: list[Any]) -> RawRole:
        return RawRole(*found)

    def complex(self, found: list[Any]) -> RawComplex:
        return RawComplex(*found)

    def ratio(self, found: list[Any]) -> RawRatio:
        return RawRatio(*found)

    def tensor(self, found: list[Any]) -> RawTensor:
        return RawTensor(found[0], found[1:-2], *found[-2:])

    def dim(self, found: list[Any]) -> RawDim:
        return RawDim(found[0], found[1:])

    def split(self, found: list[Any]) -> RawSplit:
        return RawSplit(*found)

    def as_list(self, found: list[Any]) -> list[Any]:
        return found

    def as_tuple(self, found: list[Any]) -> tuple[Any, ...]:
        return tuple(found)

    mesh = params = outcomes = returned = as_list
    targets = operands = values = types = location = partial = owner = attrs = sequence = as_list
    axis = param = outcome = attr = as_tuple


@cache
def grammar() -> Lark:
    return Lark(
        Path(__file__).with_name("grammar.lark").read_text(encoding="utf-8"),
        start=["module", "tensor", "attrs"],
        parser="lalr",
        lexer="contextual",
        transformer=_Shapes(),
        maybe_placeholders=False,
    )


_MEANING: Mapping[str, str] = {
    "VALUE": "a value such as `%x`",
    "SYMBOL": "a function name such as `@step`",
    "NAME": "a name",
    "OP": "an op such as `aten.mm`",
    "TYPE": "a type such as `f32[8, 384]`",
    "ATTRS": "`{`",
    "STRING": "a string in double quotes",
    "INT": "a whole number",
    "SIGNED": "a whole number",
    "SIZE": "a size such as `2*s0`",
    "NUMBER": "a number",
    "CONSTANT": "a word such as `true`",
    "$END": "the end",
}
"""Names of terminals in messages to the user; the others are shown as their own text."""


def expected(error: UnexpectedInput) -> str:
    meanings = sorted((_meaning(each) for each in _allowed(error)), key=lambda text: (text[0] != "`", text))
    return " or ".join([", ".join(meanings[:-1]), meanings[-1]] if len(meanings) > 1 else meanings)


def _meaning(terminal: str) -> str:
    return _MEANING.get(terminal) or f"`{grammar().get_terminal(terminal).pattern.value}`"


def _allowed(error: UnexpectedInput) -> set[str]:
    """The terminals expected at the mistake, comments and blanks left out."""
    accepts = cast("set[str]", error.interactive_parser.accepts() if error.interactive_parser else set())
    seen = cast("set[str] | None", getattr(error, "allowed", None) or getattr(error, "expected", None))
    return (accepts or seen or set[str]()) - {"COMMENT", "BLANK"}


def bad_token(error: UnexpectedInput) -> Token | None:
    """The token that does not fit; None where the text is no token at all."""
    return cast("Token", error.token) if isinstance(error, UnexpectedToken) else None


def is_end(error: UnexpectedInput) -> bool:
    token = bad_token(error)
    return token is not None and token.type == "$END"


def token_before(error: UnexpectedInput) -> Token | None:
    if is_end(error) and error.interactive_parser:
        return cast("Token | None", getattr(error.interactive_parser.lexer_thread.state, "last_token", None))
    history = cast("Iterable[Token]", getattr(error, "token_history", None) or ())
    return next(iter(history), None)


def advice(error: UnexpectedInput, found: str) -> str:
    unclosed = found.startswith('"') and "STRING" in _allowed(error)
    return "the string is not closed on its line" if unclosed else ""
