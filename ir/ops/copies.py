"""Ops that copy elements to other places: concatenation, padding, reversal, and writes into a slice."""

from __future__ import annotations

from moaic.ir.graph import Op
from moaic.ir.ops.declaration import OpDecl
from moaic.ir.ops.rule_building import (
    attr_int,
    attr_ints,
    from_front,
    linear_sets,
    operand_types,
    rule_of_factors,
    whole_dim,
    whole_dims,
    whole_rule,
)
from moaic.ir.ops.views import diagonal, equal_parts
from moaic.ir.rules import Rule


def _cat(op: Op) -> Rule:
    target = op.results[0].type
    dim = from_front(attr_int(op, "dim"), len(target.shape))
    if any(len(t.shape) != len(target.shape) for t in operand_types(op)):
        return whole_rule(op)
    parts = {t.shape[dim] for t in operand_types(op)}
    if len(parts) == 1 and 0 not in parts:
        whole, part, sizes = equal_parts(dim, target, parts.pop())
        return Rule((part,) * len(operand_types(op)), (whole,), sizes, frozenset({"p"}), linear_sets(op, [(0,)]))
    return whole_dim((0,))(op)


def _pad(op: Op) -> Rule:
    """Padded dims are whole; linear where zeros are padded."""
    source, target = operand_types(op)[0].shape, op.results[0].type.shape
    pads = attr_ints(op, "pad")
    rank = len(source)
    padded = {rank - 1 - i // 2 for i, pad in enumerate(pads) if pad}
    linear = [(0,)] if op.attrs.get("value", 0.0) in (0, 0.0, None) else []
    left = [f"l{i}!" if i in padded else f"d{i}" for i in range(len(source))]
    right = [f"r{i}!" if i in padded else f"d{i}" for i in range(len(target))]
    return rule_of_factors(op, [left], [right], *linear)


def _flip(op: Op) -> Rule:
    return whole_dims(op, attr_ints(op, "dims"), (0,))


OPS = (
    OpDecl("aten.cat", _cat, exact=True),
    OpDecl("aten.constant_pad_nd", _pad, exact=True),
    OpDecl("aten.flip", _flip, exact=True),
    OpDecl("aten.slice_scatter", whole_dim((0, 1)), exact=True),
    OpDecl("aten.diagonal_scatter", diagonal),
)
