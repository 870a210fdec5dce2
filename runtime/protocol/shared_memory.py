"""The shared memory of a host's workers: its layout, and its creation."""

from __future__ import annotations

import os
from typing import Final

from moaic.runtime.host.status import LINE, WORDS

SLOT_BYTES: Final = 2 << 20
"""Bytes of one slot: small enough to be still in the cache when it is read."""

TURNS: Final = range(2)
"""Slots of collectives, used in turn: one is written while the other is read."""

AHEAD: Final = range(2, 18)
"""Slots of sends, which a busy receiver may read later. Pages that are never written use no memory."""

SLOTS: Final = AHEAD.stop

POSTED, RETURNED, ASLEEP, MET, LEVEL, GIVEN_UP, ROOT, WHERE = range(8)
"""Words of the lines that worker r writes for worker p.

POSTED, RETURNED: counts of the slots posted to p and of p's slots given back. ASLEEP: whether r sleeps until p writes.
MET: the last command at whose end r has waited for p. LEVEL: the last one after which r has discarded p's posts.
GIVEN_UP: the last command that r has given up, and ROOT: the command whose error is the cause of that. From WHERE on:
the slot of each of the last posts, by their count modulo `SLOTS`.
"""

PAIR: Final = -(-(WHERE + SLOTS) // WORDS)
"""Lines of a pair."""


def memory_bytes(ranks: int) -> int:
    return slots_start(ranks) + SLOTS * SLOT_BYTES * ranks


def create_memory(ranks: int) -> int:
    """A descriptor of zeroed memory for `ranks` workers, freed with its last descriptor and mapping."""
    descriptor = os.memfd_create("moaic", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, memory_bytes(ranks))
    return descriptor


def create_store() -> int:
    """A descriptor of an empty file through which workers find each other, freed with its last descriptor."""
    return os.memfd_create("moaic-store", os.MFD_CLOEXEC)


def slots_start(ranks: int) -> int:
    return LINE * (ranks + PAIR * ranks * ranks)
