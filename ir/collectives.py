"""The instructions by which ranks along an axis communicate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from moaic.ir.ring import RINGS

ALL_REDUCE: Final = "moai.all_reduce"
ALL_GATHER: Final = "moai.all_gather"
REDUCE_SCATTER: Final = "moai.reduce_scatter"

COLLECTIVES: Final[Mapping[str, tuple[str, str]]] = {
    ALL_REDUCE: ("pending", "whole"),
    REDUCE_SCATTER: ("pending", "split"),
    ALL_GATHER: ("split", "whole"),
    "moai.all_to_all": ("split", "split"),
    "moai.shard": ("whole", "split"),
    "moai.first": ("whole", "pending"),
}
"""What each finds on its axis and what it leaves: every change from one state to another but one.

No single one makes a split value pending.
"""

CARRYING: Final = tuple(name for name, (found, _) in COLLECTIVES.items() if found != "whole")
"""Those that carry data; of a whole value each rank has its part already."""

MEETINGS: Final = frozenset({*COLLECTIVES, *RINGS.values()})
"""What all ranks along an axis do together."""
