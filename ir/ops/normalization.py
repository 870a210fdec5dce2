"""Softmax and layer norm, forward and backward: the normalized dims are whole."""

from __future__ import annotations

from moaic.ir.graph import Op
from moaic.ir.ops.declaration import OpDecl, each
from moaic.ir.ops.rule_building import (
    attr_ints,
    factor_names,
    operand_types,
    rule_of_factors,
    wanted_gradients,
    whole_dim,
)
from moaic.ir.rules import Rule


def _layer_norm(op: Op) -> Rule:
    count = len(attr_ints(op, "normalized_shape"))
    rank = len(operand_types(op)[0].shape)
    outer, inner = factor_names(rank - count, "a"), [f"d{i}!" for i in range(count)]
    stats = [*outer, *[f"u{i}" for i in range(count)]]
    operands = [[*outer, *inner], *([inner] * (len(operand_types(op)) - 1))]
    return rule_of_factors(op, operands, [[*outer, *inner], stats, stats])


def _layer_norm_backward(op: Op) -> Rule:
    count = len(attr_ints(op, "normalized_shape"))
    rank = len(operand_types(op)[0].shape)
    outer, inner = factor_names(rank - count, "a"), [f"d{i}!" for i in range(count)]
    full, stats = [*outer, *inner], [*outer, *[f"u{i}" for i in range(count)]]
    operands = [full, full, stats, stats, *([inner] * (len(operand_types(op)) - 4))]
    gradients = zip([full, inner, inner], wanted_gradients(op), strict=True)
    return rule_of_factors(op, operands, [spec for spec, wanted in gradients if wanted], (0,))


OPS = (
    *each("_softmax _log_softmax", OpDecl("aten.*", whole_dim(), cost="costly")),
    *each("_softmax_backward_data _log_softmax_backward_data", OpDecl("aten.*", whole_dim((0,)))),
    OpDecl("aten.native_layer_norm", _layer_norm),
    OpDecl("aten.native_layer_norm_backward", _layer_norm_backward),
)
