"""Checks of values made operands of what follows, so that every result depends on them.

An assertion has no result, so dead-code elimination would drop it. It is captured as an op whose operand is the
asserted bool. Here it also gets the value that was compared, returns it, and later uses of that value read the result:

    %ok = aten.all(%b)            // %b = aten.ge.Scalar(%x) {other=0}
    %c = moai.checked(%ok, %ok)
    %y = aten.sqrt(%x)
  becomes
    %c = moai.checked(%x, %b)
    %y = aten.sqrt(%c)

A check that no result of the forward depends on after this is appended to the first result.
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


def enforced(function: Function) -> Function:
    """A captured function whose results depend on all its checks."""
    if not any(op.name == CHECKED for op in function.ops):
        return function
    function = _inserted(function)
    for check in _without_effect(function):
        function = _appended(function, check)
    return function


def _inserted(function: Function) -> Function:
    """Every check with its value, which later ops and results read from it; checks of a backward have no reader."""
    makers = {value: op for op in function.ops for value in op.results}
    known: dict[Value, Value] = {}
    ops: list[Op] = []
    for old in function.ops:
        for op in _elementwise(old, makers) if old.name == CHECKED else (old,):
            ops.append(op.with_operands(known))
            if op.name == CHECKED and op.loc.side == "forward":
                known[next(op.inputs())] = op.results[0]
    return replace(function, ops=tuple(ops), results=tuple(known.get(each, each) for each in function.results))


def _elementwise(check: Op, makers: Makers) -> Iterator[Op]:
    """Replace a check of `all(bools)` by elementwise checks of the bools, with the ops that these need."""
    value, asserted = check.inputs()
    if value is not asserted:
        yield _check(check, value, asserted)
        return
    for bools, inverted in _elements(asserted, makers):
        compared = _compared(bools, makers)
        if inverted or bools.type.dtype != "bool":
            attrs: dict[str, Attr] = {} if inverted else {"other": 0}
            made = _op(check, "aten.logical_not" if inverted else "aten.ne.Scalar", bools, _bools(bools), **attrs)
            yield made
            yield _check(check, compared, made.results[0])
        else:
            yield _check(check, compared, bools)


def _elements(asserted: Value, makers: Makers, inverted: bool = False) -> Iterator[tuple[Value, bool]]:
    """The bools that must all be true for `asserted` to be true; all false, if the second is true."""
    op = makers.get(asserted)
    if op is None or not _is_conjunction(op, inverted):
        yield asserted, inverted
        return
    for source in op.inputs():
        yield from _elements(source, makers, inverted != (op.name in _NOT))


def _is_conjunction(op: Op, inverted: bool) -> bool:
    """Whether a true result (false, if `inverted`) says that all elements of the operands are so (`not`: are not)."""
    types = [source.type for source in op.inputs()]
    if any(type_.dtype != "bool" for type_ in types):
        return False
    same_shape = all(type_.shape == op.results[0].type.shape for type_ in types)
    return op.name in _NOT | (_ANY if inverted else _ALL) or (same_shape and op.name in (_OR if inverted else _AND))


def _compared(bools: Value, makers: Makers) -> Value:
    """The value that bools were computed from, element by element."""
    value = bools
    while value.type.dtype == "bool" and (op := makers.get(value)) is not None:
        source = next((each for each in op.inputs() if each.type.shape == value.type.shape), None)
        if source is None:
            break
        value = source
    return value


def _without_effect(function: Function) -> list[Op]:
    """The checks that no result depends on; for a check of the forward, no result of the forward."""
    forward = backward_slice(function, (function.results[i] for i in function.outputs))
    return [
        op
        for at, op in enumerate(function.ops)
        if op.name == CHECKED and not (op.loc.side == "forward" and at in forward)
    ]


def _appended(function: Function, check: Op) -> Function:
    """Append the check, of all elements at once, to the first result of its side."""
    places = function.outputs if check.loc.side == "forward" else function.gradients
    if not places:
        raise Diagnostic(
            f"a graph computes nothing but the check {check.attrs['message']!r}",
            hint="leave the check out of the compiled model, for example with torch.compiler.disable",
        )
    _, bools = check.inputs()
    counted = _counted(check, bools) if bools.type.dtype == "bool" and bools.type.shape else []
    first = function.results[places[0]]
    last = _check(check, first, counted[-1].results[0] if counted else bools)
    results = tuple(last.results[0] if at == places[0] else each for at, each in enumerate(function.results))
    return replace(function, ops=(*function.ops, *counted, last), results=results)


def _counted(check: Op, bools: Value) -> list[Op]:
    """Whether no element is false, as a sum: workers and micro-batches can add up their partial sums."""
    wrong = _op(check, "aten.logical_not", bools, _bools(bools))
    number = TensorType("i64", bools.type.shape)
    ones = _op(check, "aten._to_copy", wrong.results[0], number, dtype="i64")
    dims = tuple(range(len(number.shape)))
    count = _op(check, "aten.sum.dim_IntList", ones.results[0], TensorType("i64", ()), dim=dims)
    return [wrong, ones, count, _op(check, "aten.eq.Scalar", count.results[0], TensorType("bool", ()), other=0)]


def _check(check: Op, value: Value, bools: Value) -> Op:
    return replace(check, operands=(value, bools), results=(Value(value.type, value.name),))


def _op(check: Op, name: str, operand: Value, type_: TensorType, **attrs: Attr) -> Op:
    return Op(name, (operand,), (Value(type_),), attrs, check.loc)


def _bools(like: Value) -> TensorType:
    return TensorType("bool", like.type.shape)
