"""Operands and flags of attention: `moai.sdpa` and `moai.sdpa_backward`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from moaic.ir.graph import Op, Value
from moaic.ir.op_names import SDPA, SDPA_BACKWARD

ATTENTION: Final[Mapping[str, int]] = {SDPA: 3, SDPA_BACKWARD: 6}
"""Operands of each op without the mask, which comes last."""


def is_causal(op: Op) -> bool:
    """Whether a row attends only to keys up to its own position."""
    return bool(op.attrs.get("is_causal", False))


def causal_divisor(causal: bool) -> int:
    """What the causal flag divides the FLOPs of attention by: it leaves half of all pairs of a query and a key."""
    return 2 if causal else 1


def query_at(op: Op) -> int:
    """Position of the query, in forward or backward, in a ring or not; key and value follow it."""
    return 1 if op.name.endswith("_backward") else 0


def query_key_value(op: Op) -> tuple[Value, Value, Value]:
    query, key, value = list(op.inputs())[query_at(op) : query_at(op) + 3]
    return query, key, value


def mask_of(op: Op) -> Value | None:
    """The mask of attention, if it has one; any other op has none."""
    count = ATTENTION.get(op.name, len(op.operands))
    mask = op.operands[count] if len(op.operands) > count else None
    return mask if isinstance(mask, Value) else None
