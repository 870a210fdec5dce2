"""What must hold of every module. Runs before and after every pass; the first thing that does not hold is raised.

A check is a generator of complaints: each names both sides of a mismatch. Where the complaint is about, and the lines
around it, are added here, once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import combinations
from math import prod
from typing import NoReturn, cast

from moaic.ir.accumulation import ACCUMULATE, ADD_TO
from moaic.ir.attention import mask_of, query_key_value
from moaic.ir.collectives import COLLECTIVES, Change
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Function, Module, Op, Role, Value
from moaic.ir.layout import REPLICATED, Mesh, Split, State
from moaic.ir.ops import CHECKED, SCALED_MM, SEND, Kind, kind_of, rule_of
from moaic.ir.parser import parse_with_places
from moaic.ir.printer import LINE_LENGTH, render_attr, render_op, render_type, value_names
from moaic.ir.ring_attention import RING, RING_BACKWARD, around, attention_of, why_not
from moaic.ir.rules import Rule, Strategy
from moaic.ir.types import DTYPE_BYTES, TensorType

PARAM_ROLES = frozenset({"", "input", "param", "buffer", "key", "tangent", "constant", "coordinate", "saved"})
RESULT_ROLES = frozenset({"", "output", "grad", "update", "saved"})

NEIGHBORS = 3
"""Ops shown before and after the one that is wrong."""

_OP_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)+|call", re.ASCII)
_WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)

Complaints = Iterator[str]


class Invalid(Diagnostic):
    """A module that is not well formed. `subject` is the op or the function to which the message belongs."""

    def __init__(self, message: str, subject: Function | Op | None, context: str = "") -> None:
        super().__init__(message, context=context)
        self.subject = subject


def check_made(module: Module, by: str) -> Module:
    """`module`, which the pass `by` made; RuntimeError if it is not well formed, since that is our bug."""
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
    """Parses and verifies; what does not hold is shown where it stands in the file."""
    parsed = parse_with_places(text, filename)
    try:
        verify(parsed.module)
    except Invalid as error:
        if error.subject is None:
            raise
        raise Diagnostic(error.message, parsed.place(error.subject)) from None
    return parsed.module


def _mesh(mesh: Mesh) -> Complaints:
    if len(mesh.sizes) < len(mesh.axes):
        yield f"the mesh {mesh} has two axes of one name"
    for axis, size in mesh.axes:
        if size < 1:
            yield f"axis `{axis}` of the mesh {mesh} has no ranks"


class _Checker:
    """The walk over one module: what is defined, which types are known to be fine, and who is above."""

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
        yield from _homes(op, self.mesh)
        if op.name == "call":
            yield from self._call(op)
            return
        if op.name in _CHECKS:
            yield from _CHECKS[op.name](op, self.mesh)
        if kind_of(op) is not Kind.INSTRUCTION:
            yield from _layouts(op, self.mesh)

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
            yield f"no function `@{name}` stands above"
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


def _homes(op: Op, mesh: Mesh) -> Complaints:
    """An op runs where its results are; what it reads is there, or everywhere. Only a send changes homes."""
    if op.name == SEND:
        return
    homes = {value.type.layout.owner for value in (*op.inputs(), *op.results)} - {()}
    if len(homes) > 1 or (homes and any(not value.type.layout.owner for value in op.results)):
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
    splits, pending, home = tensor.layout.splits, tensor.layout.partial, tensor.layout.owner
    axes = [*(split.axis for split in splits), *pending, *(axis for axis, _ in home)]
    for axis in axes:
        if axis not in mesh.sizes:
            yield f"`{axis}` is no axis of the mesh {mesh}"
        if axes.count(axis) > 1:
            yield f"axis `{axis}` stands in it twice"
    for split in splits:
        yield from _split(split, tensor.shape, mesh)
    for one, other in combinations(splits, 2):
        yield from _two_splits(one, other, mesh)
    if list(pending) != sorted(pending):
        yield f"the pending sums are out of order: {', '.join(pending)}"
    for axis, rank in home:
        if rank >= mesh.size(axis):
            yield f"there is no rank {rank} on axis `{axis}` of the mesh {mesh}"


def _split(split: Split, shape: tuple[int, ...], mesh: Mesh) -> Complaints:
    ranks = mesh.size(split.axis)
    if not 0 <= split.dim < len(shape):
        yield f"axis `{split.axis}` splits dim {split.dim}, but there are {len(shape)} dims"
    elif split.stride < 1:
        yield f"axis `{split.axis}` splits dim {split.dim} with stride {split.stride}"
    elif shape[split.dim] % (ranks * split.stride):
        size = shape[split.dim]
        yield f"axis `{split.axis}`, {ranks} ranks at stride {split.stride}, does not divide dim {split.dim} of {size}"


def _two_splits(one: Split, other: Split, mesh: Mesh) -> Complaints:
    """Splits stand in the order of their dims, of one dim the larger stride first, and take digits apart."""
    if (one.dim, -one.stride, one.axis) > (other.dim, -other.stride, other.axis):
        yield f"the splits over `{one.axis}` and `{other.axis}` are out of order: the larger stride stands first"
    elif one.dim == other.dim and one.stride % (other.stride * mesh.size(other.axis)):
        inner = f"`{other.axis}` (stride {other.stride}, {mesh.size(other.axis)} ranks)"
        yield f"on dim {one.dim} the splits over `{one.axis}` (stride {one.stride}) and {inner} overlap"


def _layouts(op: Op, mesh: Mesh) -> Complaints:
    """On every axis each rank may run the op on what it holds: the op's rule allows these states together."""
    values = [*op.inputs(), *op.results]
    axes = [axis for axis, _ in mesh.axes if any(value.type.layout.state(axis) != REPLICATED for value in values)]
    if not axes:
        return
    try:
        rule = rule_of(op)
    except Diagnostic as error:
        yield error.message
        return
    except (ArithmeticError, AssertionError, LookupError, ValueError) as error:
        # Rules are made for ops that fit together; text that somebody wrote need not.
        types = ", ".join(render_type(value.type, mesh) for value in values)
        yield f"its operands, results and attributes do not fit together ({types}): {error!r}"
        return
    for axis in axes:
        operands = tuple(value.type.layout.state(axis) for value in op.inputs())
        results = tuple(value.type.layout.state(axis) for value in op.results)
        if Strategy(operands, results) not in _strategies(rule, operands, results, mesh.size(axis)):
            before, after = _states(operands), _states(results)
            yield f"over `{axis}` it cannot turn {before or 'nothing'} into {after}: its rule is {rule}"


def _strategies(
    rule: Rule, operands: tuple[State, ...], results: tuple[State, ...], ranks: int
) -> Iterator[Strategy | None]:
    """What the rule allows, given one of the states."""
    yield rule.replicated()
    for dims, state in zip((*rule.operands, *rule.results), (*operands, *results), strict=True):
        yield rule.following(dims, state, ranks)
    for linear in rule.linear:
        yield rule.by_linearity(linear)


def _states(states: Iterable[State]) -> str:
    return ", ".join(map(str, states))


# Our own ops, one check each.

Check = Callable[[Op, Mesh], Complaints]


def _change(states: Change) -> str:
    return " into ".join(state.__name__.lower() for state in states)


def _operands(op: Op, least: int, most: int | None = None) -> Complaints:
    """The operands are values, as many as said; only those after the first `least` may be absent."""
    count, most = len(op.operands), least if most is None else most
    if not least <= count <= most:
        yield f"it has {count} operands, not {least if least == most else f'{least} to {most}'}"
    for index, operand in enumerate(op.operands):
        if isinstance(operand, tuple) or (operand is None and index < least):
            yield f"operand {index} is no value"


def _results(op: Op, count: int) -> Complaints:
    if len(op.results) != count:
        yield f"it has {len(op.results)} results, not {count}"


def _whole_number(op: Op, *names: str) -> Complaints:
    for name in names:
        value = op.attrs.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            yield f"attribute `{name}` is `{render_attr(value)}`, not a whole number"


def _number(op: Op, name: str) -> int:
    value = op.attrs[name]
    assert isinstance(value, int)
    return value


def _moved(op: Op, mesh: Mesh) -> Complaints:
    """One value brought elsewhere along an axis: into another layout by a collective, to another rank by a send."""
    yield from _operands(op, 1)
    yield from _results(op, 1)
    axis = op.attrs.get("axis")
    if not isinstance(axis, str) or axis not in mesh.sizes:
        yield f"attribute `axis` is `{render_attr(axis)}`, no axis of the mesh {mesh}"
        return
    before, after = next(op.inputs()).type, op.results[0].type
    sides = f"operand `{render_type(before, mesh)}`, result `{render_type(after, mesh)}`"
    complaints = _sent(axis, before, after) if op.name == SEND else _laid_anew(op.name, axis, before, after)
    yield from (f"{complaint}: {sides}" for complaint in complaints)


def _laid_anew(name: str, axis: str, before: TensorType, after: TensorType) -> Complaints:
    if (before.dtype, before.shape) != (after.dtype, after.shape):
        yield "operand and result differ in more than their layout"
    have, want = before.layout.state(axis), after.layout.state(axis)
    wanted, found = COLLECTIVES[name], (type(have), type(want))
    if found != wanted or have == want:
        yield f"over `{axis}` it turns {_change(wanted)}, not {_change(found)}"
    if before.anywhere().layout.without(axis) != after.anywhere().layout.without(axis):
        yield f"it changes more than axis `{axis}`"


def _sent(axis: str, before: TensorType, after: TensorType) -> Complaints:
    source, target = before.layout.owner_on(axis), after.layout.owner_on(axis)
    if source is None or target is None or source == target:
        yield f"it brings a value from one rank of `{axis}` to another"
    elif before != after.with_layout(after.layout.with_owner(axis, source)):
        yield f"operand and result differ in more than the rank of `{axis}`"


def _part(op: Op, mesh: Mesh) -> Complaints:
    """Of `count` equal parts of the local operand the one that `index` says."""
    yield from _operands(op, 1)
    yield from _results(op, 1)
    yield from _whole_number(op, "index", "count", "dim", "stride")
    yield from _parts(next(op.inputs()).type, [op.results[0].type], op, _number(op, "count"), mesh)
    if _number(op, "index") >= _number(op, "count"):
        yield f"there is no part {op.attrs['index']} of {op.attrs['count']}"


def _join(op: Op, mesh: Mesh) -> Complaints:
    yield from _operands(op, max(1, len(op.operands)))
    yield from _results(op, 1)
    yield from _whole_number(op, "dim", "stride")
    parts = [value.type for value in op.inputs()]
    yield from _parts(op.results[0].type, parts, op, len(parts), mesh)


def _parts(whole: TensorType, parts: list[TensorType], op: Op, count: int, mesh: Mesh) -> Complaints:
    """`parts` are each one of `count` equal parts of `whole` along the op's dim, on every rank."""
    dim, stride = _number(op, "dim"), _number(op, "stride")
    local = whole.local_shape(mesh)
    if dim >= len(local):
        yield f"there is no dim {dim} in `{render_type(whole, mesh)}`"
    elif count < 1 or stride < 1 or local[dim] % (count * stride):
        yield f"dim {dim}, {local[dim]} on each rank, does not fall into {count} parts with stride {stride}"
    else:
        wanted = (*local[:dim], local[dim] // count, *local[dim + 1 :])
        for part in parts:
            if part.dtype != whole.dtype or part.local_shape(mesh) != wanted:
                side = f"`{render_type(part, mesh)}` is no part of `{render_type(whole, mesh)}`"
                yield f"{side}: on each rank {list(part.local_shape(mesh))}, not {list(wanted)}"


def _accumulate(op: Op, mesh: Mesh) -> Complaints:
    """The first operand is the sum so far, absent before the first part; the element type may change on the way.

    Both are absent where a sum begins at nothing: at zeros.
    """
    if op.operands != (None, None) and (len(op.operands) != 2 or not isinstance(op.operands[1], Value)):
        yield "it takes a sum, absent at first, and what is added to it"
    yield from _results(op, 1)
    result = op.results[0].type
    for value in op.inputs():
        if (value.type.shape, value.type.layout) != (result.shape, result.layout):
            yield f"the sum is `{render_type(result, mesh)}`, an operand `{render_type(value.type, mesh)}`"


def _add_to(op: Op, mesh: Mesh) -> Complaints:
    """The sum so far and what is added to it; the result is of the sum's type."""
    yield from _operands(op, 2)
    yield from _results(op, 1)
    total, *parts = (value.type for value in op.inputs())
    if total != op.results[0].type:
        yield f"the sum is `{render_type(total, mesh)}`, the result `{render_type(op.results[0].type, mesh)}`"
    for part in parts:
        if (part.shape, part.layout) != (total.shape, total.layout):
            yield f"the sum is `{render_type(total, mesh)}`, what is added to it `{render_type(part, mesh)}`"


def _shapes(op: Op, spelled: str, values: Iterable[Value], sizes: dict[str, int]) -> Complaints:
    """Binds the letters of `spelled`, one word per value, to sizes; a letter has one size."""
    for word, value in zip(spelled.split(), values, strict=False):
        if len(word) != len(value.type.shape):
            yield f"`{list(value.type.shape)}` is not of the form {', '.join(word)}"
            return
        for letter, size in zip(word, value.type.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                yield f"size {letter} is {sizes[letter]} in one place and {size} in another"


def _attention(op: Op, mesh: Mesh) -> Complaints:
    yield from _operands(op, 3, 4)
    yield from _results(op, 2)
    operands = [operand for operand in op.operands[:3] if isinstance(operand, Value)]
    yield from _shapes(op, "bhqd bhkd bhke bhqe bhq", [*operands, *op.results], {})
    yield from _attention_attrs(op)


def _attention_backward(op: Op, mesh: Mesh) -> Complaints:
    yield from _operands(op, 6, 7)
    yield from _results(op, 3)
    operands = [operand for operand in op.operands[:6] if isinstance(operand, Value)]
    yield from _shapes(op, "bhqe bhqd bhkd bhke bhqe bhq bhqd bhkd bhke", [*operands, *op.results], {})
    yield from _attention_attrs(op)


def _in_ring(of: Check) -> Check:
    """Attention whose values are cut into a block for each rank of the axis, and otherwise lie as its rule says."""

    def check(op: Op, mesh: Mesh) -> Complaints:
        yield from of(op, mesh)
        axis = op.attrs.get("axis")
        if not isinstance(axis, str) or axis not in mesh.sizes:
            yield f"attribute `axis` is `{render_attr(axis)}`, no axis of the mesh {mesh}"
            return
        if (why := why_not(op, mesh.size(axis))) or (why := _mask_misfit(op, mesh)):
            yield why
            return
        stripes = op.attrs.get("stripes", mesh.size(axis))
        if stripes != mesh.size(axis):
            yield f"attribute `stripes` is `{render_attr(stripes)}`, and `{axis}` has {mesh.size(axis)} ranks"
            return
        strategy = around(op, mesh.size(axis))
        values, states = (*op.inputs(), *op.results), (*strategy.operands, *strategy.results)
        for value, state in zip(values, states, strict=True):
            if value.type.layout.state(axis) != state:
                yield f"over `{axis}` `{render_type(value.type, mesh)}` is to be {_states([state])} in a ring"
        yield from _layouts(op, mesh)

    return check


def _mask_misfit(op: Op, mesh: Mesh) -> str:
    """What is wrong with the mask, if there is one and anything is."""
    query, key, _ = query_key_value(op)
    mask = mask_of(attention_of(op))
    if mask is None:
        return ""
    wanted = (*query.type.shape[:3], key.type.shape[2])
    shape = mask.type.shape
    if len(shape) <= 4 and all(one in (1, other) for one, other in zip(shape[::-1], wanted[::-1], strict=False)):
        return ""
    return f"the mask `{render_type(mask.type, mesh)}` does not broadcast to {list(wanted)}"


def _grouped(spelled: str) -> Check:
    """Of two dims each, or of three with a dim of blocks, which may be one of several or shared."""

    def check(op: Op, mesh: Mesh) -> Complaints:
        yield from _operands(op, 3)
        yield from _results(op, 1)
        values = [*op.inputs(), *op.results]
        words = [
            word[len(word) - len(value.type.shape) :] for word, value in zip(spelled.split(), values, strict=False)
        ]
        plain = [
            TensorType(v.type.dtype, v.type.shape[-len(w.strip("p")) :]) for v, w in zip(values, words, strict=False)
        ]
        yield from _shapes(op, " ".join(word.strip("p") for word in words), [Value(kind) for kind in plain], {})

    return check


def _scaled(op: Op, mesh: Mesh) -> Complaints:
    yield from _operands(op, 4)
    yield from _results(op, 1)
    left, right, *scales = op.inputs()
    sizes: dict[str, int] = {}
    yield from _shapes(op, "mk kn mn", [left, right, *op.results], sizes)
    for scale, wanted in zip(scales, ((sizes["m"], 1), (1, sizes["n"])), strict=True):
        if scale.type.shape not in (wanted, (1, 1)):
            yield f"a scale is of [1, 1] or {list(wanted)}, not `{render_type(scale.type, mesh)}`"
    if op.attrs.get("dtype") != op.results[0].type.dtype:
        said = render_attr(op.attrs.get("dtype"))
        yield f"attribute `dtype` is `{said}`, the result `{render_type(op.results[0].type, mesh)}`"


def _attention_attrs(op: Op) -> Complaints:
    if not isinstance(op.attrs.get("is_causal", False), bool):
        yield f"attribute `is_causal` is `{render_attr(op.attrs['is_causal'])}`, not true or false"
    if not isinstance(op.attrs.get("scale"), float | None):
        yield f"attribute `scale` is `{render_attr(op.attrs['scale'])}`, not a number such as 0.125"


KEY = TensorType("i64", (2,))


def _fold_key(op: Op, mesh: Mesh) -> Complaints:
    yield from _operands(op, 1)
    yield from _results(op, 1)
    yield from _whole_number(op, "instance")
    for value in (*op.inputs(), *op.results):
        if value.type.anywhere() != KEY:
            yield f"a key is `{render_type(KEY, mesh)}`, not `{render_type(value.type, mesh)}`"


def _checked(op: Op, mesh: Mesh) -> Complaints:
    yield from _operands(op, 2)
    yield from _results(op, 1)
    value, said = (each.type for each in op.inputs())
    given = op.results[0].type
    if (given.dtype, given.shape) != (value.dtype, value.shape):
        yield f"the result is `{render_type(given, mesh)}`, not `{render_type(value, mesh)}` as the operand"
    if said.dtype not in ("bool", "i32"):
        yield f"what is asked is bools, or codes that are i32, not `{render_type(said, mesh)}`"
    if not isinstance(op.attrs.get("message"), str):
        yield "attribute `message` is no text"


def _rand(op: Op, mesh: Mesh) -> Complaints:
    """A global op has a key alone; a local one also the coordinates of the part that it makes."""
    splits = op.attrs.get("splits", ())
    if not isinstance(splits, tuple):
        yield f"attribute `splits` is `{render_attr(splits)}`, not a list"
        return
    yield from _operands(op, 1 + len(splits))
    yield from _results(op, 1)
    key, *coordinates = (value.type for value in op.inputs())
    if key.anywhere() != KEY:
        yield f"the key is `{render_type(KEY, mesh)}`, not `{render_type(key, mesh)}`"
    for given in coordinates:
        if given.dtype != "i64" or given.elements() != 1:
            yield f"a coordinate is one i64, not `{render_type(given, mesh)}`"


def _view(op: Op, mesh: Mesh) -> Complaints:
    yield from _operands(op, 1)
    yield from _results(op, 1)
    before, after = next(op.inputs()).type, op.results[0].type
    if prod(before.shape) != prod(after.shape):
        yield f"operand `{render_type(before, mesh)}` and result `{render_type(after, mesh)}` differ in their elements"
    yield from _size(op, mesh)


def _size(op: Op, mesh: Mesh) -> Complaints:
    """The attribute `size` is the shape of the result; -1 leaves a size open."""
    size, shape = op.attrs.get("size"), op.results[0].type.shape
    said = size if isinstance(size, tuple) else (size,)
    if len(said) != len(shape) or any(one not in (-1, other) for one, other in zip(said, shape, strict=True)):
        yield f"attribute `size` is `{render_attr(size)}`, the result `{render_type(op.results[0].type, mesh)}`"


def _matmul(spelled: str) -> Check:
    def check(op: Op, mesh: Mesh) -> Complaints:
        yield from _operands(op, 2)
        yield from _results(op, 1)
        yield from _shapes(op, spelled, [*op.inputs(), *op.results], {})

    return check


_CHECKS: Mapping[str, Check] = {
    **dict.fromkeys((*COLLECTIVES, SEND), _moved),
    "moai.part": _part,
    "moai.join": _join,
    ACCUMULATE: _accumulate,
    ADD_TO: _add_to,
    "moai.sdpa": _attention,
    "moai.sdpa_backward": _attention_backward,
    RING: _in_ring(_attention),
    RING_BACKWARD: _in_ring(_attention_backward),
    "moai.grouped_mm": _grouped("psd efd s psf"),
    "moai.grouped_outer": _grouped("psf psd s efd"),
    SCALED_MM: _scaled,
    CHECKED: _checked,
    "moai.fold_key": _fold_key,
    "moai.rand": _rand,
    **dict.fromkeys(("aten.view", "aten._unsafe_view", "aten.reshape"), _view),
    **dict.fromkeys(("aten.expand", "aten.full", "aten.zeros", "aten.ones"), _size),
    "aten.mm": _matmul("mk kn mn"),
    "aten.bmm": _matmul("bmk bkn bmn"),
}
