"""Stacks of recurrent layers and their gradients: rows of a batch are independent, time and features stay whole.

    %out, %h, %c, %record = moai.recurrent %x, [%h0, %c0], [%w_ih, %w_hh, ...] {mode = "lstm", saved = 36, ...}
    %dx, %dw, ... = moai.recurrent_backward %record, [%dout, _, _], %x, [%h0, %c0], [...] {wanted = ..., ...}

A GRU and a plain layer have one state. A record stands for what autograd saves of the layers, of each row and time step
as many values as `saved` says; without one (`_`), backward runs them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final

from moaic.ir.graph import Op, Operand, Value
from moaic.ir.layout import Mesh
from moaic.ir.op_names import RECURRENT, RECURRENT_BACKWARD
from moaic.ir.ops.checks import result_count, shapes
from moaic.ir.ops.declaration import Complaints, Kind, OpDecl
from moaic.ir.ops.rule_building import operand_types, rule_of_factors, whole_rule
from moaic.ir.printer import render_attr
from moaic.ir.recurrent import MODES, flops, products_in_backward, values_saved
from moaic.ir.rules import Rule
from moaic.ir.types import DTYPE_BYTES, TensorType

_SPELLED: Final = ("lbp", "lbc")
"""The dims of states."""

_PARAMS: Final = (2, 3, 4, 5)
"""Parameters of a layer in one direction: two matrices, with biases two more, with a projection one more."""


def _dims(spelled: str) -> list[str]:
    """Factors of a rule: the batch may be split, all else is whole."""
    return [letter if letter == "b" else f"{letter}!" for letter in spelled]


_X, _OUT, _RECORD, *_STATES = map(_dims, ("tbi", "tbo", "tbr", *_SPELLED))


def _rule(op: Op) -> Rule:
    if op.attrs["batch_sizes"]:
        return whole_rule(op)
    states = _STATES[: _count(op.operands[1])]
    params = operand_types(op)[1 + len(states) :]
    record = [_RECORD] if op.attrs.get("saved") else []
    return rule_of_factors(op, [_X, *states, *_whole(params)], [_OUT, *states, *record])


def _rule_of_backward(op: Op) -> Rule:
    """Gradients of parameters are sums over the batch, and all are linear in those of the results."""
    if op.attrs["batch_sizes"]:
        return whole_rule(op)
    grads, wanted = op.operands[1], op.attrs["wanted"]
    assert isinstance(grads, tuple)
    assert isinstance(wanted, tuple)
    states = _STATES[: len(grads) - 1]
    record = [_RECORD] if _has_record(op) else []
    given = [*record, *(dims for dims, grad in zip([_OUT, *states], grads, strict=True) if grad is not None)]
    params = _whole(operand_types(op)[len(given) + 1 + len(states) :])
    operands = [_X, *states, *params]
    results = [dims for dims, is_wanted in zip(operands, wanted, strict=True) if is_wanted]
    return rule_of_factors(op, [*given, *operands], results, (1,))


def _whole(params: Sequence[TensorType]) -> list[list[str]]:
    return [[f"w{i}_{dim}!" for dim in range(len(param.shape))] for i, param in enumerate(params)]


def _count(operand: Operand) -> int:
    return len(operand) if isinstance(operand, tuple) else 1


def _has_record(op: Op) -> bool:
    return op.operands[0] is not None


def _shapes(operands: Sequence[Operand]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Of the input and of the parameters."""
    x, *rest = (value.type.shape for value in _flat(operands))
    return x, rest[_count(operands[1]) :]


def _flops(op: Op) -> int:
    return flops(*_shapes(op.operands))


def _flops_of_backward(op: Op) -> int:
    return products_in_backward(is_recorded=_has_record(op)) * flops(*_shapes(op.operands[2:]))


def _workspace_of_backward(op: Op) -> int:
    """What autograd saves of the layers that are run again."""
    if _has_record(op):
        return 0
    x, params = _shapes(op.operands[2:])
    return prod(x[:-1]) * values_saved(str(op.attrs["mode"]), params) * DTYPE_BYTES[op.results[0].type.dtype]


def _check(op: Op, mesh: Mesh) -> Complaints:
    if complaints := [*_check_layers(op, op.operands)]:
        yield from complaints
        return
    states, saved = op.operands[1], op.attrs.get("saved", 0)
    if not isinstance(saved, int) or isinstance(saved, bool) or saved < 0:
        yield f"attribute `saved` is `{render_attr(saved)}`, not a number of values"
        return
    yield from result_count(op, 1 + _count(states) + bool(saved))
    if saved:
        yield from _check_record(op.operands, op.results[-1], str(saved))
    if _is_padded(op):
        yield from shapes(op, " ".join(["tbo", *_SPELLED[: _count(states)]]), op.results, _sizes(op.operands))


def _check_backward(op: Op, mesh: Mesh) -> Complaints:
    if complaints := [*_check_layers(op, op.operands[2:])]:
        yield from complaints
        return
    grads, wanted = op.operands[1], op.attrs.get("wanted")
    _, states, params = op.operands[2:]
    if not isinstance(grads, tuple) or len(grads) != 1 + _count(states) or grads == (None,) * len(grads):
        yield "the second operand is a list of a gradient, or `_`, for the output and for each last state"
        return
    if not isinstance(wanted, tuple) or len(wanted) != 1 + _count(states) + _count(params):
        yield f"attribute `wanted` is `{render_attr(wanted)}`, not a list of a bool for each of the other operands"
        return
    yield from result_count(op, sum(map(bool, wanted)))
    if (record := op.operands[0]) is not None:
        assert isinstance(record, Value)
        yield from _check_record(op.operands[2:], record)
    if _is_padded(op):
        spelled = [word for word, grad in zip(["tbo", *_SPELLED], grads, strict=False) if grad is not None]
        yield from shapes(op, " ".join(spelled), [grad for grad in grads if grad is not None], _sizes(op.operands[2:]))
    told = [value for value, is_wanted in zip(_flat(op.operands[2:]), wanted, strict=True) if is_wanted]
    for value, result in zip(told, op.results, strict=True):
        if value.type.shape != result.type.shape:
            yield f"the gradient of `{list(value.type.shape)}` is of shape `{list(result.type.shape)}`"


def _check_record(operands: Sequence[Operand], record: Value, saved: str = "") -> Complaints:
    x, _ = _shapes(operands)
    shape = record.type.shape
    if shape[:-1] != x[:-1] or (saved and str(shape[-1]) != saved):
        wanted = ", ".join([*map(str, x[:-1]), saved or "values"])
        yield f"the record of these layers is of shape `[{wanted}]`, not `{list(shape)}`"


def _check_layers(op: Op, operands: Sequence[Operand]) -> Complaints:
    """What both ops have: input, states, parameters, and the attributes of the layers."""
    kinds = [type(operand) for operand in operands]
    if kinds != [Value, tuple, tuple] or any(None in each for each in operands if isinstance(each, tuple)):
        yield "recurrent layers take an input, a list of states and a list of parameters"
        return
    layers, states = op.attrs.get("num_layers"), 1 + (op.attrs.get("mode") == "lstm")
    if op.attrs.get("mode") not in MODES:
        yield f"attribute `mode` is `{render_attr(op.attrs.get('mode'))}`, not one of {', '.join(MODES)}"
    elif not all(isinstance(op.attrs.get(name), bool) for name in ("has_biases", "bidirectional")):
        yield "attributes `has_biases` and `bidirectional` are to be true or false"
    elif not isinstance(layers, int) or layers < 1:
        yield f"attribute `num_layers` is `{render_attr(layers)}`, not a number of layers"
    elif not isinstance(op.attrs.get("batch_sizes"), tuple):
        yield "attribute `batch_sizes` is a list, empty for sequences that are padded to one length"
    elif _count(operands[1]) != states:
        yield f"{op.attrs['mode']} layers have {states} states, not {_count(operands[1])}"
    elif _is_padded(op):
        yield from shapes(op, " ".join(["tbi", *_SPELLED[:states]]), _flat(operands)[: 1 + states], {})
    own = layers * (1 + bool(op.attrs.get("bidirectional"))) if isinstance(layers, int) else 1
    if _count(operands[2]) not in (own * each for each in _PARAMS):
        yield f"{_count(operands[2])} parameters are not 2 to 5 for each layer and direction"


def _is_padded(op: Op) -> bool:
    return not op.attrs["batch_sizes"]


def _flat(operands: Sequence[Operand]) -> list[Value]:
    return list(Op("", tuple(operands)).inputs())


def _sizes(operands: Sequence[Operand]) -> dict[str, int]:
    """The sizes of the dims that results share with input and states."""
    x, *states = _flat(operands)[: 1 + _count(operands[1])]
    sizes = dict(zip("tb", x.type.shape, strict=False))
    for word, state in zip(_SPELLED, states, strict=False):
        sizes.update(zip(word, state.type.shape, strict=True))
    return sizes


OPS = (
    OpDecl(RECURRENT, _rule, Kind.HEAVY, _flops, "mm", _check, lowered=True),
    OpDecl(
        RECURRENT_BACKWARD,
        _rule_of_backward,
        Kind.HEAVY,
        _flops_of_backward,
        "mm",
        _check_backward,
        lowered=True,
        workspace=_workspace_of_backward,
    ),
)
