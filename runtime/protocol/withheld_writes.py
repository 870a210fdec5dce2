"""Buffers whose replicas differ after an error."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def differing_replicas(reports: Collection[Any]) -> list[int]:
    """Buffers whose replicas differ: some of their holders have withheld a write that others have done.

    `reports` are the answers of all workers to ListWithheld: the first withheld command by buffer, and all ids.
    """
    withheld: list[Mapping[int, int]] = [report[0] for report in reports]
    held = [set(report[1]) for report in reports]
    differing: list[int] = []
    for buffer_id in sorted({each for writes in withheld for each in writes}):
        first = {writes.get(buffer_id) for writes, ids in zip(withheld, held, strict=True) if buffer_id in ids}
        if len(first) > 1:
            differing.append(buffer_id)
    return differing
