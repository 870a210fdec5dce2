"""Stable topological sort: each item after its dependencies, and otherwise in its old order."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Mapping

from moaic.ir.graph import Op


def topological_sort(waiting: Mapping[int, Collection[int]]) -> list[int] | None:
    """Positions, each after those on which it depends, the least possible first; None for a cycle."""
    readers: dict[int, list[int]] = defaultdict(list)
    for position, needs in waiting.items():
        for need in needs:
            readers[need].append(position)
    left = {position: len(needs) for position, needs in waiting.items()}
    ready = [position for position, count in left.items() if not count]
    heapq.heapify(ready)
    ordered: list[int] = []
    while ready:
        position = heapq.heappop(ready)
        ordered.append(position)
        for reader in readers[position]:
            left[reader] -= 1
            if not left[reader]:
                heapq.heappush(ready, reader)
    return ordered if len(ordered) == len(waiting) else None


def sort_ops(ops: Mapping[int, Op]) -> tuple[Op, ...] | None:
    """Ops by their positions, each after those whose results it reads; None for a cycle."""
    makers = {result: position for position, op in ops.items() for result in op.results}
    waiting = {
        position: {makers[value] for value in op.inputs() if makers.get(value, position) != position}
        for position, op in ops.items()
    }
    ordered = topological_sort(waiting)
    return None if ordered is None else tuple(ops[position] for position in ordered)
