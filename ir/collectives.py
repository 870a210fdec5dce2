"""The instructions by which ranks along an axis communicate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from moaic.ir.layout import Partial, Replicated, Sharded, State
from moaic.ir.op_names import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, FIRST, REDUCE_SCATTER, SHARD
from moaic.ir.ring_attention import RINGS

Change = tuple[type[State], type[State]]
"""The state of a value on an axis before, and the one after."""

COLLECTIVES: Final[Mapping[str, Change]] = {
    ALL_REDUCE: (Partial, Replicated),
    REDUCE_SCATTER: (Partial, Sharded),
    ALL_GATHER: (Sharded, Replicated),
    ALL_TO_ALL: (Sharded, Sharded),
    SHARD: (Replicated, Sharded),
    FIRST: (Replicated, Partial),
}
"""Each collective and the change that it makes; no collective makes a sharded value partial."""

COLLECTIVE_FOR: Final[Mapping[Change, str]] = {change: name for name, change in COLLECTIVES.items()}

COMMUNICATING: Final = tuple(name for name, (before, _) in COLLECTIVES.items() if before is not Replicated)
"""Collectives that send data; each rank already holds its part of a replicated value."""

PASSES_SENT: Final[Mapping[str, int]] = {name: 2 if name == ALL_REDUCE else 1 for name in COMMUNICATING}
"""How often each rank sends its share of the larger side: an all-reduce is a reduce-scatter and an all-gather."""


def sent_share(name: str, ranks: int) -> float:
    """The part of a collective's larger side that each of `ranks` sends; names other than collectives send it once."""
    return PASSES_SENT.get(name, 1) * (ranks - 1) / ranks


SYNCHRONIZING: Final = frozenset({*COLLECTIVES, *RINGS.values()})
"""Instructions that all ranks along an axis run together."""
