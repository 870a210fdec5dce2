"""Cut a run of costs into consecutive pieces whose largest is as small as can be, where little has to cross."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

SLACK = 0.03
"""A piece may be this much larger than needed if less has to cross a border for it."""


def cut(costs: Sequence[float], crossing: Sequence[int], pieces: int) -> list[int]:
    """For each position the number of its piece; `crossing` holds what a cut before position 1, 2, … passes on."""
    upto = [0.0, *accumulate(costs)]
    most = least_bound(upto, pieces) * (1 + SLACK)
    borders = _cheapest_borders(upto, crossing, pieces, most)
    found: list[int] = []
    for piece, (start, end) in enumerate(zip([0, *borders], [*borders, len(costs)], strict=True)):
        found += [piece] * (end - start)
    return found


def least_bound(upto: Sequence[float], pieces: int) -> float:
    """The smallest bound on a piece, of the running sums `upto`, with which so many pieces do; found by halving."""
    low = max(b - a for a, b in pairwise(upto))
    high = max(upto[-1], low)
    for _ in range(60):
        middle = (low + high) / 2
        if _pieces_needed(upto, middle) <= pieces:
            high = middle
        else:
            low = middle
    return high


def _pieces_needed(upto: Sequence[float], bound: float) -> int:
    count, start = 1, 0.0
    for before, after in pairwise(upto):
        if after - start > bound:
            count, start = count + 1, before
    return count


def _cheapest_borders(upto: Sequence[float], crossing: Sequence[int], pieces: int, most: float) -> list[int]:
    """Where to cut so that no piece costs more than `most`, none is empty, and the least crosses in all."""
    positions = len(upto) - 1
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for piece in range(pieces - 1):
        reached: dict[int, tuple[float, list[int]]] = {}
        for start, (price, borders) in best.items():
            for end in range(start + 1, positions - (pieces - 2 - piece)):
                if upto[end] - upto[start] > most:
                    break
                if _rest_fits(upto, end, pieces - 1 - piece, most):
                    found = (price + crossing[end - 1], [*borders, end])
                    reached[end] = min(reached.get(end, found), found)
        best = reached
    return min(best.values())[1]


def _rest_fits(upto: Sequence[float], start: int, pieces: int, most: float) -> bool:
    """Whether what is left can cost no more than `most` on average."""
    return upto[-1] - upto[start] <= most * pieces
