"""Checks of values, put between what they are about and all that reads it later: results depend on every one of them.

An assertion gives nothing, so what drops ops that nobody reads would drop it. Captured, it is an op that says what is
asked and nothing else. Here it gets the value that was compared, element by element, and what is read of that value
from there on is read of the checked one. A check that no result of the forward comes by so is put behind the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from moaic.ir.backward_slice import backward_slice
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Attr, Function, Op, Value
from moaic.ir.op_names import CHECKED
from moaic.ir.types import TensorType

DEFAULT_MESSAGE: Final = "Expected Tensor with single nonzero value, but got zero"
"""The message of an assertion without one, as PyTorch words it."""

Makers = Mapping[Value, Op]

_ALL = frozenset({"aten.all", "aten.all.dim", "aten.all.dims"})
_ANY = frozenset({"aten.any", "aten.any.dim", "aten.any.dims"})
_NOT = frozenset({"aten.logical_not", "aten.bitwise_not"})
_AND = frozenset({"aten.logical_and", "aten.bitwise_and.Tensor"})
_OR = frozenset({"aten.logical_or", "aten.bitwise_or.Tensor"})


def in_force(function: Function) -> Function:
    """A captured function whose results are given only if its checks hold."""
    if not any(op.name == CHECKED for op in function.ops):
        return function
    function = _between(function)
    for check in _passed_by(function):
        function = _at_the_end(function, check)
    return function


def _between(function: Function) -> Function:
    """Every check with its value, which later ops and results read from it. Those of a backward stay aside."""
    makers = {value: op for op in function.ops for value in op.results}
    known: dict[Value, Value] = {}
    ops: list[Op] = []
    for old in function.ops:
        for op in _about(old, makers) if old.name == CHECKED else (old,):
            ops.append(op.with_operands(known))
            if op.name == CHECKED and op.loc.side == "forward":
                known[next(op.inputs())] = op.results[0]
    return replace(function, ops=tuple(ops), results=tuple(known.get(each, each) for each in function.results))


def _about(check: Op, makers: Makers) -> Iterator[Op]:
    """Checks of one element after the other where one asks for all, and what needs to be made for them."""
    value, said = check.inputs()
    if value is not said:
        yield _check(check, value, said)
        return
    for each, inverted in _elements(said, makers):
        about = _compared(each, makers)
        if inverted or each.type.dtype != "bool":
            attrs: dict[str, Attr] = {} if inverted else {"other": 0}
            made = _op(check, "aten.logical_not" if inverted else "aten.ne.Scalar", each, _bools(each), **attrs)
            yield made
            yield _check(check, about, made.results[0])
        else:
            yield _check(check, about, each)


def _elements(said: Value, makers: Makers, inverted: bool = False) -> Iterator[tuple[Value, bool]]:
    """Bools that are all true just where `said` is; or all false, where the second is true."""
    op = makers.get(said)
    if op is None or not _asks_more(op, inverted):
        yield said, inverted
        return
    for source in op.inputs():
        yield from _elements(source, makers, inverted != (op.name in _NOT))


def _asks_more(op: Op, inverted: bool) -> bool:
    """Whether what an op gives is true, or false, just where all elements of all its operands are."""
    kinds = [source.type for source in op.inputs()]
    if any(kind.dtype != "bool" for kind in kinds):
        return False
    alike = all(kind.shape == op.results[0].type.shape for kind in kinds)
    return op.name in _NOT | (_ANY if inverted else _ALL) or (alike and op.name in (_OR if inverted else _AND))


def _compared(said: Value, makers: Makers) -> Value:
    """What bools were made from, element by element."""
    value = said
    while value.type.dtype == "bool" and (op := makers.get(value)) is not None:
        source = next((each for each in op.inputs() if each.type.shape == value.type.shape), None)
        if source is None:
            break
        value = source
    return value


def _passed_by(function: Function) -> list[Op]:
    """Checks that results do not depend on: of those of a forward, the results that it gives."""
    forward = backward_slice(function, (function.results[i] for i in function.outputs))
    return [
        op
        for at, op in enumerate(function.ops)
        if op.name == CHECKED and not (op.loc.side == "forward" and at in forward)
    ]


def _at_the_end(function: Function, check: Op) -> Function:
    """The check once more, of all elements at once, between a result and whoever gets it."""
    places = function.outputs if check.loc.side == "forward" else function.gradients
    if not places:
        raise Diagnostic(
            f"nothing is computed here but the check {check.attrs['message']!r}",
            hint="keep it out of the compiled model, for example with torch.compiler.disable",
        )
    _, said = check.inputs()
    counted = _counted(check, said) if said.type.dtype == "bool" and said.type.shape else []
    first = function.results[places[0]]
    last = _check(check, first, counted[-1].results[0] if counted else said)
    results = tuple(last.results[0] if at == places[0] else each for at, each in enumerate(function.results))
    return replace(function, ops=(*function.ops, *counted, last), results=results)


def _counted(check: Op, said: Value) -> list[Op]:
    """Whether none is false: as a sum, which every worker and micro-batch has a part of."""
    wrong = _op(check, "aten.logical_not", said, _bools(said))
    number = TensorType("i64", said.type.shape)
    ones = _op(check, "aten._to_copy", wrong.results[0], number, dtype="i64")
    dims = tuple(range(len(number.shape)))
    count = _op(check, "aten.sum.dim_IntList", ones.results[0], TensorType("i64", ()), dim=dims)
    return [wrong, ones, count, _op(check, "aten.eq.Scalar", count.results[0], TensorType("bool", ()), other=0)]


def _check(check: Op, value: Value, said: Value) -> Op:
    return replace(check, operands=(value, said), results=(Value(value.type, value.name),))


def _op(check: Op, name: str, operand: Value, kind: TensorType, **attrs: Attr) -> Op:
    return Op(name, (operand,), (Value(kind),), attrs, check.loc)


def _bools(like: Value) -> TensorType:
    return TensorType("bool", like.type.shape)
