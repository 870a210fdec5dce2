"""Partition a sequence of costs into consecutive pieces.

The largest piece is minimal, up to some slack, then the bytes that cross are, then the pieces are most alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

SLACK = 0.03
"""A piece may exceed the minimal bound by this share if fewer bytes cross a boundary for it."""


def balanced_partition(costs: Sequence[float], crossing: Sequence[int], pieces: int) -> list[int]:
    """The number of the piece of each position; `crossing` holds the bytes that cross a boundary before 1, 2 and on."""
    prefix_sums = [0.0, *accumulate(costs)]
    most = least_bound(prefix_sums, pieces) * (1 + SLACK)
    boundaries = _cheapest_boundaries(prefix_sums, crossing, pieces, most)
    numbers: list[int] = []
    for piece, (start, end) in enumerate(zip([0, *boundaries], [*boundaries, len(costs)], strict=True)):
        numbers += [piece] * (end - start)
    return numbers


def least_bound(prefix_sums: Sequence[float], pieces: int) -> float:
    """The smallest bound on a piece, given `prefix_sums` of the costs, that allows `pieces` pieces, by bisection."""
    low = max(b - a for a, b in pairwise(prefix_sums))
    high = max(prefix_sums[-1], low)
    for _ in range(60):
        middle = (low + high) / 2
        if _pieces_needed(prefix_sums, middle) <= pieces:
            high = middle
        else:
            low = middle
    return high


def _pieces_needed(prefix_sums: Sequence[float], bound: float) -> int:
    count, start = 1, 0.0
    for before, after in pairwise(prefix_sums):
        if after - start > bound:
            count, start = count + 1, before
    return count


def _cheapest_boundaries(prefix_sums: Sequence[float], crossing: Sequence[int], pieces: int, most: float) -> list[int]:
    """Boundaries such that no piece costs more than `most`, none is empty, and the fewest bytes cross.

    Of several those with the least sum of squared costs. Dynamic programming over the ends of the first, second and
    further pieces: `fewest` bytes and `least` squares with which a piece may end at each position.
    """
    sums, crossed = np.array(prefix_sums), np.array([0, *crossing, 0], float)
    earliest = np.searchsorted(sums, sums - most)
    fewest, least = np.full(len(sums), np.inf), np.full(len(sums), np.inf)
    fewest[0] = least[0] = 0.0
    starts: list[np.ndarray[tuple[int], np.dtype[np.int_]]] = []
    for later in reversed(range(pieces)):
        fewest_now, least_now = np.full(len(sums), np.inf), np.full(len(sums), np.inf)
        start_of = np.zeros(len(sums), int)
        last = len(sums) - 1 - later
        for end in np.flatnonzero(sums[-1] - sums[: last + 1] <= most * later) if later else [last]:
            window = slice(earliest[end], end)
            nbytes = fewest[window].min(initial=np.inf)
            if nbytes < np.inf:
                squares = least[window] + (sums[end] - sums[window]) ** 2
                squares[fewest[window] > nbytes] = np.inf
                start_of[end] = earliest[end] + squares.argmin()
                fewest_now[end], least_now[end] = nbytes + crossed[end], squares.min()
        fewest, least = fewest_now, least_now
        starts.append(start_of)
    boundaries = [len(sums) - 1]
    for start_of in reversed(starts):
        boundaries.insert(0, int(start_of[boundaries[0]]))
    return boundaries[1:-1]
