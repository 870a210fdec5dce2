"""Verification of a module, before and after every pass: the first complaint is raised.

A check is a generator of complaints, each of which names both sides of a mismatch; place and neighboring lines are
added here. Checks of single ops are in their declarations, in `ir/ops`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import NoReturn, cast

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Function, Module, Op, Role, Value
from moaic.ir.layout import Mesh, Split, is_uneven
from moaic.ir.op_names import SEND
from moaic.ir.ops import Kind, declaration_of, rule_of
from moaic.ir.ops.checks import layouts_follow_rule
from moaic.ir.ops.declaration import Complaints
from moaic.ir.parser import Parsed, parse_with_places
from moaic.ir.printer import LINE_LENGTH, render_op, render_type, value_names
from moaic.ir.types import DTYPE_BYTES, TensorType

PARAM_ROLES = frozenset({"", "input", "param", "buffer", "key", "tangent", "constant", "coordinate", "saved"})
RESULT_ROLES = frozenset({"", "output", "grad", "update", "saved"})

NEIGHBORS = 3
"""Ops shown before and after the wrong one."""

_OP_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)+|call", re.ASCII)
_WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)


class Invalid(Diagnostic):
    """A module that is not well formed. `subject` is the op or the function to which the message belongs."""

    def __init__(self, message: str, subject: Function | Op | None, context: str = "") -> None:
        super().__init__(message, context=context)
        self.subject = subject


def check_made(module: Module, by: str) -> Module:
    """`module`, the result of pass `by`; RuntimeError if it is not well formed, which is a bug of the pass."""
    try:
        verify(module)
    except Invalid as error:
        raise RuntimeError(f"pass {by} made a module that is not well formed: {error}") from error
    return module


def verify(module: Module) -> None:
    """Raises Invalid unless `module` is well formed."""
    for complaint in _mesh(module.mesh):
        raise Invalid(complaint, None)
    checked: dict[str, Function] = {}
    checker = _Checker(module.mesh, checked)
    for function in module.functions:
        checker.function(function)
        checked[function.name] = function


def load(text: str, filename: str = "<text>") -> Module:
    """Parses and verifies; a Diagnostic points at the place in the file."""
    return load_with_places(text, filename).module


def load_with_places(text: str, filename: str = "<text>") -> Parsed:
    """As `load`, with the place of each function and op."""
    parsed = parse_with_places(text, filename)
    try:
        verify(parsed.module)
    except Invalid as error:
        if error.subject is None:
            raise
        raise Diagnostic(error.message, parsed.place(error.subject)) from None
    return parsed


def _mesh(mesh: Mesh) -> Complaints:
    if len(mesh.sizes) < len(mesh.axes):
        yield f"the mesh {mesh} has two axes of one name"
    for axis, size in mesh.axes:
        if size < 1:
            yield f"axis `{axis}` of the mesh {mesh} has no ranks"


class _Checker:
    """The walk over one module: defined values, types known to be well formed, functions above."""

    def __init__(self, mesh: Mesh, callees: Mapping[str, Function]) -> None:
        self.mesh = mesh
        self.callees = callees
        self.fine: set[TensorType] = set()

    def function(self, function: Function) -> None:
        for complaint in self._head(function):
            raise Invalid(f"in function `@{function.name}`: {complaint}", function)
        defined = set(function.params)
        for index, op in enumerate(function.ops):
            for complaint in self._op(op, defined):
                self._fail(function, index, complaint)
            defined.update(op.results)
        for position, value in enumerate(function.results):
            if value not in defined:
                name = value_names(function).get(value, value.name)
                message = f"in function `@{function.name}`: result {position}, `%{name}`, is not defined"
                raise Invalid(message, function)

    def _fail(self, function: Function, index: int, complaint: str) -> NoReturn:
        op = function.ops[index]
        context = _neighborhood(function, index, self.mesh)
        raise Invalid(f"in function `@{function.name}`: `{op.name}`: {complaint}", op, context)

    def _head(self, function: Function) -> Complaints:
        if function.name in self.callees:
            yield "another function has this name"
        if len(set(function.params)) < len(function.params):
            yield "two parameters are one value"
        for value in function.params:
            yield from self._type(value.type)
        yield from _roles("parameter", function.params, function.param_roles, PARAM_ROLES)
        yield from _roles("result", function.results, function.result_roles, RESULT_ROLES)

    def _op(self, op: Op, defined: set[Value]) -> Complaints:
        if not _OP_NAME.fullmatch(op.name):
            yield "an op is called `namespace.name`, or `call`"
        for value in op.inputs():
            if value not in defined:
                yield f"operand `%{value.name or '?'}` of type `{self._text(value.type)}` is not defined above"
        if len(set(op.results)) < len(op.results) or not defined.isdisjoint(op.results):
            yield "a result is defined already"
        for value in op.results:
            yield from self._type(value.type)
        yield from _attrs(op)
        yield from _owners(op, self.mesh)
        if op.name == "call":
            yield from self._call(op)
            return
        declaration = declaration_of(op)
        if declaration.check is not None:
            yield from declaration.check(op, self.mesh)
        if declaration.kind is not Kind.INSTRUCTION:
            yield from layouts_follow_rule(op, rule_of, self.mesh)

    def _text(self, tensor: TensorType) -> str:
        return render_type(tensor, self.mesh)

    def _type(self, tensor: TensorType) -> Complaints:
        if tensor not in self.fine:
            for complaint in _type(tensor, self.mesh):
                yield f"type `{self._text(tensor)}`: {complaint}"
            self.fine.add(tensor)

    def _call(self, op: Op) -> Complaints:
        name = op.attrs.get("callee")
        callee = self.callees.get(name) if isinstance(name, str) else None
        if callee is None:
            yield f"no function `@{name}` is defined above"
            return
        given = [operand for operand in op.operands if isinstance(operand, Value)]
        if len(given) < len(op.operands):
            yield "a call takes values, no lists and no absent operands"
        yield from self._match(f"operands, `@{name}` takes", given, callee.params)
        yield from self._match(f"results, `@{name}` gives", op.results, callee.results)

    def _match(self, what: str, given: Iterable[Value], wanted: Iterable[Value]) -> Complaints:
        here, there = [value.type for value in given], [value.type for value in wanted]
        if len(here) != len(there):
            yield f"{len(here)} {what} {len(there)}"
        for index, (one, other) in enumerate(zip(here, there, strict=False)):
            if one.anywhere() != other.anywhere():
                kind, _, rest = what.partition(", ")
                yield f"{kind.removesuffix('s')} {index} is `{self._text(one)}`, {rest} `{self._text(other)}`"


def _owners(op: Op, mesh: Mesh) -> Complaints:
    """An op runs on the owner of its results; each operand has this owner or none. Only a send changes owners."""
    if op.name == SEND:
        return
    owners = {value.type.layout.owner for value in (*op.inputs(), *op.results)} - {()}
    if len(owners) > 1 or (owners and any(not value.type.layout.owner for value in op.results)):
        types = ", ".join(render_type(value.type, mesh) for value in (*op.inputs(), *op.results))
        yield f"it runs on one rank, and its operands and results are not all there ({types}): `{SEND}` brings them"


def _neighborhood(function: Function, index: int, mesh: Mesh) -> str:
    names = value_names(function)
    first = max(0, index - NEIGHBORS)
    lines = [
        f"{'  >' if op is function.ops[index] else '   '} {_shorten(render_op(op, names, mesh))}"
        for op in function.ops[first : index + NEIGHBORS + 1]
    ]
    before = [f"    … {first} ops"] if first else []
    rest = len(function.ops) - first - len(lines)
    return "\n".join([*before, *lines, *([f"    … {rest} ops"] if rest else [])])


def _shorten(line: str) -> str:
    return line if len(line) <= LINE_LENGTH else f"{line[: LINE_LENGTH - 2]} …"


def _roles(what: str, values: tuple[Value, ...], roles: tuple[Role, ...], known: frozenset[str]) -> Complaints:
    if roles and len(roles) != len(values):
        yield f"{len(values)} {what}s have {len(roles)} roles"
    for index, role in enumerate(roles):
        if role.kind not in known:
            yield f"{what} {index} has the role `{role.kind}`; there are {_alternatives(known)}"
        if role.label and not role.kind:
            yield f'{what} {index} has the label "{role.label}" but no role'


def _alternatives(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in sorted(words) if word)


def _attrs(op: Op) -> Complaints:
    for name, value in op.attrs.items():
        if not _WORD.fullmatch(name):
            yield f"`{name}` is no name for an attribute"
        if not _is_attr(value):
            yield f"attribute `{name}` is `{value!r}`, which is no literal"
    if op.loc.side not in {"", "forward", "backward"}:
        yield f"its side is `{op.loc.side}`; there are `forward` and `backward`"


def _is_attr(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_attr, cast("tuple[object, ...]", value)))
    return value is None or isinstance(value, bool | int | float | complex | str)


def _type(tensor: TensorType, mesh: Mesh) -> Complaints:
    if tensor.dtype not in DTYPE_BYTES:
        yield f"there is no element type `{tensor.dtype}`"
    if any(size < 0 for size in tensor.shape):
        yield "a size is negative"
    splits, partial, owner = tensor.layout.splits, tensor.layout.partial, tensor.layout.owner
    axes = [*(split.axis for split in splits), *partial, *(axis for axis, _ in owner)]
    for axis in axes:
        if axis not in mesh.sizes:
            yield f"`{axis}` is no axis of the mesh {mesh}"
        if axes.count(axis) > 1:
            yield f"axis `{axis}` occurs twice"
    for split in splits:
        yield from _split(split, tensor.shape, mesh)
    for one, other in combinations(splits, 2):
        yield from _two_splits(one, other, tensor.shape, mesh)
    if list(partial) != sorted(partial):
        yield f"the axes of partial sums are out of order: {', '.join(partial)}"
    for axis, rank in owner:
        if rank >= mesh.size(axis):
            yield f"there is no rank {rank} on axis `{axis}` of the mesh {mesh}"


def _split(split: Split, shape: tuple[int, ...], mesh: Mesh) -> Complaints:
    ranks = mesh.size(split.axis)
    if not 0 <= split.dim < len(shape):
        yield f"axis `{split.axis}` splits dim {split.dim}, but there are {len(shape)} dims"
    elif split.stride < 1:
        yield f"axis `{split.axis}` splits dim {split.dim} with stride {split.stride}"
    elif shape[split.dim] % (ranks * split.stride) and not is_uneven(shape[split.dim], split.stride, ranks):
        size = shape[split.dim]
        yield f"axis `{split.axis}`, {ranks} ranks at stride {split.stride}, does not divide dim {split.dim} of {size}"


def _two_splits(one: Split, other: Split, shape: tuple[int, ...], mesh: Mesh) -> Complaints:
    """Splits are ordered by dim, those of one dim by decreasing stride, and do not overlap."""
    if (one.dim, -one.stride, one.axis) > (other.dim, -other.stride, other.axis):
        yield f"the splits over `{one.axis}` and `{other.axis}` are out of order: the larger stride stands first"
    elif one.dim == other.dim and shape[one.dim] % (one.stride * mesh.size(one.axis)):
        yield f"axis `{one.axis}` cuts dim {one.dim} unevenly, so that no other axis can: `{other.axis}` does"
    elif one.dim == other.dim and one.stride % (other.stride * mesh.size(other.axis)):
        inner = f"`{other.axis}` (stride {other.stride}, {mesh.size(other.axis)} ranks)"
        yield f"on dim {one.dim} the splits over `{one.axis}` (stride {one.stride}) and {inner} overlap"
