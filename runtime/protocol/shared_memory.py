"""The memory that the workers of a host share: its layout, and how it is made."""

from __future__ import annotations

import os
from typing import Final

from moaic.runtime.host.status import LINE, WORDS

SLOT_BYTES: Final = 2 << 20
"""Bytes of one slot: small enough that what is written there is still in the cache when it is read."""

TURNS: Final = range(2)
"""Slots of collectives, in which all meet: one is written while the other is read."""

AHEAD: Final = range(2, 18)
"""Slots of sends that a busy receiver takes later. Pages that are never written take no memory."""

SLOTS: Final = AHEAD.stop

POSTED, RETURNED, ASLEEP, MET, LEVEL, GIVEN_UP, ROOT, WHERE = range(8)
"""Words of the lines that r writes for p: slots posted to p, p's slots given back, r sleeps on p; the commands at whose
end r has met p, after which r's counts are right again, and which r has given up, with the command that is to blame;
then which slot the last posts mean, by their count modulo `SLOTS`."""

PAIR: Final = -(-(WHERE + SLOTS) // WORDS)
"""Lines of a pair."""


def memory_bytes(ranks: int) -> int:
    return slots_start(ranks) + SLOTS * SLOT_BYTES * ranks


def create_memory(ranks: int) -> int:
    """Descriptor of zeroed memory for `ranks` workers; it is gone when the last descriptor and mapping are."""
    descriptor = os.memfd_create("moaic", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, memory_bytes(ranks))
    return descriptor


def create_store() -> int:
    """Descriptor of an empty file, for workers to find each other in; it is gone with the last descriptor."""
    return os.memfd_create("moaic-store", os.MFD_CLOEXEC)


def slots_start(ranks: int) -> int:
    return LINE * (ranks + PAIR * ranks * ranks)
