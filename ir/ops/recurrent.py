"""Stacks of recurrent layers and their gradients: rows of a batch are independent, time and features stay whole.

    %out, %h, %c = moai.recurrent %x, [%h0, %c0], [%w_ih, %w_hh, ...] {mode = "lstm", num_layers = 1, ...}
    %dx, %dw, ... = moai.recurrent_backward _, [%dout, _, _], %x, [%h0, %c0], [%w_ih, %w_hh, ...] {wanted = ..., ...}

A GRU and a plain layer have one state. The first operand of the backward is a record, which programs do not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Final

from moaic.ir.graph import Attr, Op, Operand, Value
from moaic.ir.layout import Mesh
from moaic.ir.op_names import RECURRENT, RECURRENT_BACKWARD
from moaic.ir.ops.checks import result_count
from moaic.ir.ops.declaration import Complaints, Kind, OpDecl
from moaic.ir.ops.rule_building import operand_types, rule_of_factors, whole_rule
from moaic.ir.rules import Rule
from moaic.ir.types import DTYPE_BYTES, TensorType

_X, _OUT = ["t!", "b", "i!"], ["t!", "b", "o!"]
_STATES = [["l!", "b", "p!"], ["l!", "b", "c!"]]

_LAYERS_RUN_IN_BACKWARD: Final = 3
"""The layer is run again, and each of its products has two in backward."""

_SAVED: Final[Mapping[Attr, float]] = {"lstm": 4.2, "gru": 2.4}
_SAVED_BY_PLAIN: Final = 1.1
"""Values for each gate of each row and time step that PyTorch's autograd saves of a layer, by mode: measured on a CPU,
50 time steps of 16 rows."""


def _rule(op: Op) -> Rule:
    if op.attrs["batch_sizes"]:
        return whole_rule(op)
    states = _STATES[: _count(op.operands[1])]
    params = operand_types(op)[1 + len(states) :]
    return rule_of_factors(op, [_X, *states, *_whole(params)], [_OUT, *states])


def _rule_of_backward(op: Op) -> Rule:
    """Gradients of parameters are sums over the batch, and all are linear in those of the results."""
    if op.attrs["batch_sizes"]:
        return whole_rule(op)
    grads, wanted = op.operands[1], op.attrs["wanted"]
    assert isinstance(grads, tuple)
    assert isinstance(wanted, tuple)
    states = _STATES[: len(grads) - 1]
    given = [dims for dims, grad in zip([_OUT, *states], grads, strict=True) if grad is not None]
    params = _whole(operand_types(op)[len(given) + 1 + len(states) :])
    operands = [_X, *states, *params]
    results = [dims for dims, is_wanted in zip(operands, wanted, strict=True) if is_wanted]
    return rule_of_factors(op, [*given, *operands], results, (1,))


def _whole(params: Sequence[TensorType]) -> list[list[str]]:
    return [[f"w{i}_{dim}!" for dim in range(len(param.shape))] for i, param in enumerate(params)]


def _count(operand: Operand) -> int:
    return len(operand) if isinstance(operand, tuple) else 1


def _flops(op: Op) -> int:
    """Each row of each time step meets every matrix."""
    x, *rest = operand_types(op)
    matrices = rest[_count(op.operands[1]) :]
    return 2 * prod(x.shape[:-1]) * sum(param.elements() for param in matrices if len(param.shape) == 2)


def _flops_of_backward(op: Op) -> int:
    return _LAYERS_RUN_IN_BACKWARD * _flops(Op(RECURRENT, op.operands[2:]))


def _workspace_of_backward(op: Op) -> int:
    """What autograd saves of the layers that are run again."""
    x, *rest = operand_types(Op(RECURRENT, op.operands[2:]))
    matrices = [param for param in rest[_count(op.operands[3]) :] if len(param.shape) == 2]
    gates = sum(param.shape[0] for param in matrices) // 2  # of each layer a matrix for its input and one for its state
    saved = _SAVED.get(op.attrs["mode"], _SAVED_BY_PLAIN)
    return int(saved * prod(x.shape[:-1]) * gates * DTYPE_BYTES[x.dtype])


def _check(op: Op, mesh: Mesh) -> Complaints:
    yield from _check_operands(op.operands)
    yield from result_count(op, 1 + _count(op.operands[1]) if len(op.operands) > 1 else 1)


def _check_backward(op: Op, mesh: Mesh) -> Complaints:
    yield from _check_operands(op.operands[2:])
    wanted = op.attrs.get("wanted")
    if not isinstance(wanted, tuple):
        yield "attribute `wanted` is to be a list of bools, one for each operand"
        return
    yield from result_count(op, sum(map(bool, wanted)))


def _check_operands(operands: Sequence[Operand]) -> Complaints:
    kinds = [type(operand) for operand in operands]
    if kinds != [Value, tuple, tuple]:
        yield "recurrent layers take a value, a list of states and a list of parameters"


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
