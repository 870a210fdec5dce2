"""Checks that families share. Each yields one message per mismatch and names both sides of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Op, Value
from moaic.ir.layout import REPLICATED, Mesh, State
from moaic.ir.ops.declaration import Complaints, RuleMaker
from moaic.ir.printer import render_attr, render_type
from moaic.ir.rules import Rule, Strategy


def operand_count(op: Op, least: int, most: int | None = None) -> Complaints:
    """`least` to `most` operands, each a single value; only those after the first `least` may be absent."""
    count, most = len(op.operands), least if most is None else most
    if not least <= count <= most:
        yield f"it has {count} operands, not {least if least == most else f'{least} to {most}'}"
    for index, operand in enumerate(op.operands):
        if isinstance(operand, tuple) or (operand is None and index < least):
            yield f"operand {index} is no value"


def result_count(op: Op, count: int) -> Complaints:
    if len(op.results) != count:
        yield f"it has {len(op.results)} results, not {count}"


def whole_number(op: Op, *names: str) -> Complaints:
    """Each attribute is an integer of at least 0."""
    for name in names:
        value = op.attrs.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            yield f"attribute `{name}` is `{render_attr(value)}`, not a whole number"


def shapes(op: Op, spelled: str, values: Iterable[Value], sizes: dict[str, int]) -> Complaints:
    """`spelled` has a word per value and a letter per dim: a letter has one size, which `sizes` records."""
    for word, value in zip(spelled.split(), values, strict=False):
        if len(word) != len(value.type.shape):
            yield f"`{list(value.type.shape)}` is not of the form {', '.join(word)}"
            return
        for letter, size in zip(word, value.type.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                yield f"size {letter} is {sizes[letter]} in one place and {size} in another"


def size_is_shape(op: Op, mesh: Mesh) -> Complaints:
    """The attribute `size` is the shape of the result; -1 leaves a size open."""
    size, shape = op.attrs.get("size"), op.results[0].type.shape
    said = size if isinstance(size, tuple) else (size,)
    if len(said) != len(shape) or any(one not in (-1, other) for one, other in zip(said, shape, strict=True)):
        yield f"attribute `size` is `{render_attr(size)}`, the result `{render_type(op.results[0].type, mesh)}`"


def layouts_follow_rule(op: Op, make_rule: RuleMaker, mesh: Mesh) -> Complaints:
    """On every axis, the rule must allow the combined states of all values: each rank runs the op on its own parts."""
    values = [*op.inputs(), *op.results]
    axes = [axis for axis, _ in mesh.axes if any(value.type.layout.state(axis) != REPLICATED for value in values)]
    if not axes:
        return
    try:
        rule = make_rule(op)
    except Diagnostic as error:
        yield error.message
        return
    except (ArithmeticError, AssertionError, LookupError, ValueError) as error:
        # Rule makers assume operands of consistent shapes; text written by hand may have others.
        types = ", ".join(render_type(value.type, mesh) for value in values)
        yield f"its operands, results and attributes do not fit together ({types}): {error!r}"
        return
    for axis in axes:
        operands = tuple(value.type.layout.state(axis) for value in op.inputs())
        results = tuple(value.type.layout.state(axis) for value in op.results)
        if Strategy(operands, results) not in _strategies(rule, operands, results, mesh.size(axis)):
            before, after = _text(operands), _text(results)
            yield f"over `{axis}` it cannot turn {before or 'nothing'} into {after}: its rule is {rule}"


def _strategies(
    rule: Rule, operands: tuple[State, ...], results: tuple[State, ...], ranks: int
) -> Iterator[Strategy | None]:
    """The strategies of the rule that agree with at least one of the states."""
    yield rule.replicated()
    for dims, state in zip((*rule.operands, *rule.results), (*operands, *results), strict=True):
        yield rule.following(dims, state, ranks)
    for linear in rule.linear:
        yield rule.by_linearity(linear)


def _text(states: Iterable[State]) -> str:
    return ", ".join(map(str, states))
