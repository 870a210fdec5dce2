"""Attention, `moai.sdpa` and its backward: which operand is what, and whether a flag hides later keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from moaic.ir.graph import Op, Value

ATTENTION: Final[Mapping[str, int]] = {"moai.sdpa": 3, "moai.sdpa_backward": 6}
"""Its ops, and how many operands they have without a mask, which comes last."""


def is_causal(op: Op) -> bool:
    return bool(op.attrs.get("is_causal", False))


def causal_divisor(causal: bool) -> int:
    """What the causal flag divides the FLOPs of attention by: it leaves half of all pairs of a query and a key."""
    return 2 if causal else 1


def query_at(op: Op) -> int:
    """Which operand the query is, in either direction, in a ring or not: key and value come next."""
    return 1 if op.name.endswith("_backward") else 0


def query_key_value(op: Op) -> tuple[Value, Value, Value]:
    query, key, value = list(op.inputs())[query_at(op) : query_at(op) + 3]
    return query, key, value


def mask_of(op: Op) -> Value | None:
    """The mask of attention, if it has one; any other op has none."""
    count = ATTENTION.get(op.name, len(op.operands))
    mask = op.operands[count] if len(op.operands) > count else None
    return mask if isinstance(mask, Value) else None
