"""Parses text into a module: looks up the names and types of what `ir/syntax.py` reads.

An error points at its place in the text.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NoReturn, cast

from lark import Token
from lark.exceptions import UnexpectedInput

from moaic.ir.errors import Diagnostic, TextSpan
from moaic.ir.graph import NO_ATTRS, NO_ROLE, NOWHERE, Attr, Function, Location, Module, Op, Operand, Role, Value
from moaic.ir.layout import Layout, Mesh, Split
from moaic.ir.printer import VERSION, render_type
from moaic.ir.ratios import ratio
from moaic.ir.sizes import floor_symbol, parse_size, symbol, terms_of
from moaic.ir.symbols import Symbols
from moaic.ir.syntax import (
    RawAttr,
    RawComplex,
    RawDim,
    RawFunction,
    RawModule,
    RawOp,
    RawRatio,
    RawRole,
    RawSizes,
    RawTensor,
    advice,
    bad_token,
    expected,
    grammar,
    is_end,
    token_before,
)
from moaic.ir.types import DTYPE_BYTES, TensorType


@dataclass(frozen=True, slots=True)
class Parsed:
    """A module, and the places of its functions and ops in the text."""

    module: Module
    place: Callable[[Function | Op], TextSpan]


def parse(text: str, filename: str = "<text>") -> Module:
    """The module that `text` spells. Raises Diagnostic at a mistake of syntax or names; does not verify."""
    return _Reader(text, filename).module()


def parse_with_places(text: str, filename: str = "<text>") -> Parsed:
    """Like `parse`, with the place of each function and op, for messages of a later verification."""
    reader = _Reader(text, filename)
    return Parsed(reader.module(), lambda what: reader.span(reader.heads[what]))


class _Reader:
    """One reading of one text: looks names up, and reads each distinct type and attribute list once."""

    def __init__(self, text: str, filename: str) -> None:
        self.text = text
        self.filename = filename
        self.mesh = Mesh()
        self.symbols = Symbols()
        self.heads: dict[Function | Op, Token] = {}
        self._types: dict[str, TensorType] = {}
        self._attrs: dict[str, Mapping[str, Attr]] = {}

    def module(self) -> Module:
        self._check_version()
        raw = cast("RawModule", self._raw("module", self.text))
        self._define_symbols(raw.sizes)
        self.mesh = self._mesh(raw.axes)
        functions: dict[str, Function] = {}
        for each in raw.functions:
            function = self._function(each)
            self.heads[function] = each.name
            if function.name in functions:
                self.fail(each.name, f"function `@{function.name}` is defined twice")
            functions[function.name] = function
        return Module(tuple(functions.values()), self.mesh, tuple(map(self._string, raw.schedule.rows)))

    # Places and mistakes.

    def span(self, token: Token) -> TextSpan:
        return self._span(token.start_pos or 0, len(token))

    def _span(self, offset: int, width: int) -> TextSpan:
        start = self.text.rfind("\n", 0, offset) + 1
        source = self.text[start:].split("\n", 1)[0].rstrip("\r")
        column = offset - start + 1
        line = self.text.count("\n", 0, offset) + 1
        return TextSpan(self.filename, line, column, max(1, min(width, len(source) - column + 1)), source)

    def fail(self, token: Token, message: str, hint: str = "") -> NoReturn:
        raise Diagnostic(message, self.span(token), hint=hint)

    def _check_version(self) -> None:
        found = _VERSION_LINE.search(self.text)
        if found and found[1] != str(VERSION):
            span = self._span(found.start(1), len(found[1]))
            raise Diagnostic(f"this is version `{found[1]}` of the language, only version {VERSION} can be read", span)

    def _raw(self, start: str, text: str, at: Token | None = None) -> object:
        """Parses `text`, which is the token `at` of the file, or the whole file where `at` is None."""
        try:
            return grammar().parse(text, start=start)
        except UnexpectedInput as error:
            self._explain_token_before(error)
            offset, width = self._offset(error, at)
            found = self.text[offset : offset + width]
            what = f"`{found}`" if found.strip() else "the end of the line" if found else "the end"
            message = f"expected {expected(error)}, found {what}"
            raise Diagnostic(message, self._span(offset, width), hint=advice(error, found)) from None

    def _explain_token_before(self, error: UnexpectedInput) -> None:
        """A type or attribute list without its end is still lexed as one: the mistake is inside it, not behind it."""
        before = token_before(error)
        if before is not None and before.type in _STARTS:
            self._raw(_STARTS[before.type], before, before)

    def _offset(self, error: UnexpectedInput, at: Token | None) -> tuple[int, int]:
        """Offset of the mistake in the file, and its length."""
        if not is_end(error):
            offset = (at.start_pos or 0) if at is not None else 0
            return offset + (error.pos_in_stream or 0), len(bad_token(error) or " ")
        if at is None:
            return len(self.text.rstrip()), 1
        offset = at.end_pos or 0
        rest = self.text[offset:]
        return offset + len(rest) - len(rest.lstrip(" \t")), 1

    def _inside(self, inner: Token, outer: Token) -> Token:
        """`inner`, found in the text of `outer`, at its place in the file."""
        return Token(inner.type, str(inner), start_pos=(outer.start_pos or 0) + (inner.start_pos or 0))

    # Meaning.

    def _define_symbols(self, raw: RawSizes) -> None:
        for name, number, divisor in raw.symbols:
            if name in self.symbols.example or name in self.symbols.floors:
                self.fail(name, f"size `{name}` is defined twice")
            if divisor is None:
                symbol(self.symbols, str(name), int(number))
            else:
                floor_symbol(self.symbols, str(name), self._size(number), int(divisor))
        for one, other in raw.equalities:
            self.symbols.identify(terms_of(self._size(one)), terms_of(self._size(other)))

    def _size(self, token: Token, outer: Token | None = None) -> int:
        if token.type == "INT":
            return int(token)
        try:
            return parse_size(token, self.symbols)
        except KeyError as unknown:
            place = token if outer is None else self._inside(token, outer)
            known = ", ".join(f"`{name}`" for name in (*self.symbols.example, *self.symbols.floors))
            hint = f"there are {known}" if known else f"write for example `sizes {unknown.args[0]} = 8` above the mesh"
            self.fail(place, f"`{unknown.args[0]}` is no size of this file", hint)

    def _mesh(self, raw: list[tuple[Token, Token]]) -> Mesh:
        axes: dict[str, int] = {}
        for axis, size in raw:
            if axis in axes:
                self.fail(axis, f"the mesh has two axes `{axis}`")
            if int(size) < 1:
                self.fail(size, f"axis `{axis}` needs at least one rank")
            axes[str(axis)] = int(size)
        return Mesh(tuple(axes.items()))

    def _tensor(self, token: Token) -> TensorType:
        found = self._types.get(token)
        if found is None:
            found = self._types[str(token)] = self._read_tensor(token)
        return found

    def _read_tensor(self, token: Token) -> TensorType:
        raw = cast("RawTensor", self._raw("tensor", token, token))
        if raw.dtype not in DTYPE_BYTES:
            names = ", ".join(f"`{name}`" for name in DTYPE_BYTES)
            self.fail(self._inside(raw.dtype, token), f"`{raw.dtype}` is no element type", f"there are {names}")
        splits = [split for index, dim in enumerate(raw.dims) for split in self._splits(dim, index, token)]
        partial = tuple(sorted(self._axis(axis, token) for axis in raw.partial))
        owner = tuple(sorted((self._axis(axis, token), int(rank)) for axis, rank in raw.owner))
        layout = Layout(tuple(splits), partial, owner)
        return TensorType(str(raw.dtype), tuple(self._size(dim.size, token) for dim in raw.dims), layout)

    def _splits(self, dim: RawDim, index: int, token: Token) -> Iterable[Split]:
        span = self._size(dim.size, token)
        for raw in dim.splits:
            axis = self._axis(raw.axis, token)
            size = self.mesh.size(axis)
            if raw.stride is not None:
                span = self._size(raw.stride, token)
            elif span % size:
                self.fail(self._inside(raw.axis, token), f"axis `{axis}` of {size} ranks does not divide {span}")
            else:
                span //= size
            yield Split(axis, index, span)

    def _axis(self, axis: Token, token: Token) -> str:
        if axis not in self.mesh.sizes:
            mesh = f"the mesh is {self.mesh}" if self.mesh.axes else "the file has no mesh"
            hint = f"write for example `mesh [{axis}=2]` above the functions" if not self.mesh.axes else ""
            self.fail(self._inside(axis, token), f"`{axis}` is no axis of the mesh: {mesh}", hint)
        return str(axis)

    def _attributes(self, token: Token | None) -> Mapping[str, Attr]:
        if token is None:
            return NO_ATTRS
        found = self._attrs.get(token)
        if found is None:
            found = self._attrs[str(token)] = self._read_attributes(token)
        return found

    def _read_attributes(self, token: Token) -> Mapping[str, Attr]:
        attrs: dict[str, Attr] = {}
        for name, value in cast("list[tuple[Token, RawAttr]]", self._raw("attrs", token, token)):
            if name in attrs:
                self.fail(self._inside(name, token), f"attribute `{name}` is given twice")
            attrs[str(name)] = self._attr(value, token)
        return MappingProxyType(attrs)

    def _attr(self, raw: RawAttr, token: Token) -> Attr:
        if isinstance(raw, RawComplex):
            return complex(cast("float", self._attr(raw.real, token)), cast("float", self._attr(raw.imaginary, token)))
        if isinstance(raw, RawRatio):
            return ratio(self._size(raw.dividend, token), self._size(raw.divisor, token))
        if not isinstance(raw, Token):
            return tuple(self._attr(each, token) for each in raw)
        if raw.type == "STRING":
            return self._string(raw, token)
        if raw.type == "CONSTANT":
            return _CONSTANTS[raw]
        if raw.type == "SIZE":
            return self._size(raw, token)
        return float(raw) if any(char in raw for char in ".eE") else int(raw)

    def _string(self, raw: Token, outer: Token | None = None) -> str:
        try:
            return json.loads(raw[raw.index('"') :])
        except json.JSONDecodeError as error:
            place = self._inside(raw, outer) if outer is not None else raw
            self.fail(place, f"bad string: {error.msg.lower()}", 'backslashes are written `\\\\`, quotes `\\"`')

    def _symbol(self, token: Token) -> str:
        return self._string(token) if '"' in token else token[1:]

    def _function(self, raw: RawFunction) -> Function:
        values: dict[str, Value] = {}
        params = tuple(self._define(name, tensor, values) for name, tensor, _ in raw.params)
        ops = tuple(self._op(each, values) for each in raw.ops)
        results = tuple(self._look_up(name, values) for name in raw.returned)
        self._check_outcomes(raw, results)
        return Function(
            self._symbol(raw.name),
            params,
            ops,
            results,
            self._roles(role for _, _, role in raw.params),
            self._roles(role for _, role in raw.outcomes),
        )

    def _roles(self, raw: Iterable[RawRole]) -> tuple[Role, ...]:
        """No roles at all where none says anything."""
        roles = tuple(
            NO_ROLE if kind is None else Role(str(kind), "" if label is None else self._string(label))
            for kind, label in raw
        )
        return roles if any(role != NO_ROLE for role in roles) else ()

    def _check_outcomes(self, raw: RawFunction, results: tuple[Value, ...]) -> None:
        if len(raw.outcomes) != len(results):
            place = raw.returned[0] if raw.returned else raw.name
            said = _count(len(raw.outcomes), "result")
            self.fail(place, f"the head of `{raw.name}` says {said}, `return` gives {len(results)}")
        for (tensor, _), name, value in zip(raw.outcomes, raw.returned, results, strict=True):
            if self._tensor(tensor) != value.type:
                given = render_type(value.type, self.mesh)
                self.fail(name, f"the head of `{raw.name}` says `{tensor}`, `{name}` is `{given}`")

    def _define(self, name: Token, tensor: Token, values: dict[str, Value]) -> Value:
        if name in values:
            self.fail(name, f"`{name}` is defined twice")
        hint = name[1:]
        value = values[name] = Value(self._tensor(tensor), "" if hint.isdigit() else hint)
        return value

    def _look_up(self, name: Token, values: dict[str, Value]) -> Value:
        found = values.get(name)
        if found is None:
            near = difflib.get_close_matches(name, values, 1)
            self.fail(name, f"`{name}` is not defined above", f"did you mean `{near[0]}`?" if near else "")
        return found

    def _op(self, raw: RawOp, values: dict[str, Value]) -> Op:
        operands = tuple(self._operand(each, values) for each in raw.operands)
        attrs = self._attributes(raw.attrs)
        if raw.callee is not None:
            attrs = MappingProxyType({"callee": self._symbol(raw.callee), **attrs})
        if len(raw.targets) != len(raw.types):
            names = _count(len(raw.targets), "name")
            self.fail(raw.name, f"`{raw.name}` defines {names} but gives {_count(len(raw.types), 'type')}")
        results = tuple(self._define(name, tensor, values) for name, tensor in zip(raw.targets, raw.types, strict=True))
        op = Op(str(raw.name), operands, results, attrs, self._location(raw.location))
        self.heads[op] = raw.targets[0] if raw.targets else raw.name
        return op

    def _operand(self, raw: Token | list[Token], values: dict[str, Value]) -> Operand:
        if isinstance(raw, Token):
            return self._value(raw, values)
        return tuple(self._value(each, values) for each in raw)

    def _value(self, raw: Token, values: dict[str, Value]) -> Value | None:
        return None if raw.type == "ABSENT" else values.get(raw) or self._look_up(raw, values)

    def _location(self, raw: list[Token]) -> Location:
        """`at "file":line`, `in "module"` and the side, each of which may be left out."""
        if not raw:
            return NOWHERE
        rest = list(raw)
        side = str(rest.pop()) if rest[-1].type in {"FORWARD", "BACKWARD"} else ""
        file, line = "", 0
        if len(rest) > 1:
            file, line = self._string(rest[0]), int(rest[1])
            rest = rest[2:]
        return Location(file, line, self._string(rest[0]) if rest else "", side)


_CONSTANTS: Mapping[str, Attr] = {
    "none": None,
    "true": True,
    "false": False,
    "inf": float("inf"),
    "-inf": float("-inf"),
    "nan": float("nan"),
}


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


_STARTS: Mapping[str, str] = {"TYPE": "tensor", "ATTRS": "attrs"}
"""The rule that reads the inside of a token."""

_VERSION_LINE = re.compile(r"^// moai (\S+)[ \t\r]*$", re.MULTILINE)
