"""Buffers whose replicas differ after an error."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def lying_apart(reports: Collection[Any]) -> list[int]:
    """Buffers whose last writes some of their holders have withheld and others have not, so that replicas differ.

    `reports` are those of all workers.
    """
    withheld: list[Mapping[int, int]] = [report[0] for report in reports]
    held = [set(report[1]) for report in reports]
    found: list[int] = []
    for buffer_id in sorted({each for of_one in withheld for each in of_one}):
        since = {of_one.get(buffer_id) for of_one, here in zip(withheld, held, strict=True) if buffer_id in here}
        if len(since) > 1:
            found.append(buffer_id)
    return found
