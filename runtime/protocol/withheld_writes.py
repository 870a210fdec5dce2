"""Buffers whose replicas differ after an error: a worker writes on until it hears that another one's command failed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def furthest_replicas(reports: Mapping[int, Any]) -> dict[int, int | None]:
    """For each buffer whose replicas differ the rank with the latest value; None if a holder has no value.

    `reports` are the answers of all workers to ListWithheld: the first withheld command by buffer, and the ids of its
    buffers and of its poisoned ones. A value that was written has no failed operand: it is that of the write on all.
    """
    found: dict[int, int | None] = {}
    for buffer_id in sorted({each for withheld, _, _ in reports.values() for each in withheld}):
        ended = {
            rank: withheld.get(buffer_id, math.inf)
            for rank, (withheld, ids, poisoned) in sorted(reports.items())
            if buffer_id in ids or buffer_id in poisoned
        }
        if len(set(ended.values())) > 1:
            lost = any(buffer_id in poisoned for _, _, poisoned in reports.values())
            found[buffer_id] = None if lost else max(ended, key=ended.__getitem__)
    return found


def unpacked(report: Sequence[Any]) -> tuple[Mapping[int, int], frozenset[int], frozenset[int]]:
    """An answer to ListWithheld."""
    withheld, ids, poisoned = report
    return withheld, frozenset(ids), frozenset(poisoned)
