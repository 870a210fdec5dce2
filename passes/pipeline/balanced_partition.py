"""Partition a sequence of costs into consecutive pieces, each with a given share of them.

The largest piece, relative to its share, is minimal up to some slack, then the bytes that cross are, then the pieces
are most alike.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

SLACK = 0.03
"""A piece may exceed the minimal bound by this part if fewer bytes cross a boundary for it."""

HALVINGS = 60
"""Of the interval in which the minimal bound is looked for."""


def balanced_partition(costs: Sequence[float], crossing: Sequence[int], shares: Sequence[float]) -> list[int]:
    """The number of the piece of each position, of as many pieces as there are shares, and no more than costs.

    `crossing` holds the bytes that cross a boundary before 1, 2 and on.
    """
    prefix_sums = [0.0, *accumulate(costs)]
    most = least_bound(prefix_sums, shares) * (1 + SLACK)
    while (boundaries := _cheapest_boundaries(prefix_sums, crossing, shares, most)) is None:
        # The bound lets a piece be empty that has too small a share for any cost between its neighbours'.
        most *= 1 + SLACK
    numbers: list[int] = []
    for piece, (start, end) in enumerate(zip([0, *boundaries], [*boundaries, len(costs)], strict=True)):
        numbers += [piece] * (end - start)
    return numbers


def least_bound(prefix_sums: Sequence[float], shares: Sequence[float]) -> float:
    """The least cost per share that allows a piece for each share, by bisection, given `prefix_sums` of the costs."""
    low, high = 0.0, prefix_sums[-1] / min(shares)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _is_enough(prefix_sums, shares, middle):
            high = middle
        else:
            low = middle
    return high


def _is_enough(prefix_sums: Sequence[float], shares: Sequence[float], bound: float) -> bool:
    """Whether pieces that cost at most `bound` per share, each as long as possible, come to the end."""
    end, last = 0, len(prefix_sums) - 1
    for share in shares:
        end = bisect_right(prefix_sums, prefix_sums[end] + bound * share, end) - 1
        if end == last:
            return True
    return False


def _cheapest_boundaries(
    prefix_sums: Sequence[float], crossing: Sequence[int], shares: Sequence[float], most: float
) -> list[int] | None:
    """Boundaries such that no piece costs more than `most` per share, none is empty, and the fewest bytes cross.

    Of several those with the least sum of squared costs per share. Dynamic programming over the ends of the first,
    second and further pieces: `fewest` bytes and `least` squares with which a piece may end at each position.
    """
    sums, crossed = np.array(prefix_sums), np.array([0, *crossing, 0], float)
    fewest, least = np.full(len(sums), np.inf), np.full(len(sums), np.inf)
    fewest[0] = least[0] = 0.0
    starts: list[np.ndarray[tuple[int], np.dtype[np.int_]]] = []
    for piece, share in enumerate(shares):
        later = shares[piece + 1 :]
        earliest = np.searchsorted(sums, sums - most * share)
        fewest_now, least_now = np.full(len(sums), np.inf), np.full(len(sums), np.inf)
        start_of = np.zeros(len(sums), int)
        last = len(sums) - 1 - len(later)
        for end in np.flatnonzero(sums[-1] - sums[: last + 1] <= most * sum(later)) if later else [last]:
            window = slice(earliest[end], end)
            nbytes = fewest[window].min(initial=np.inf)
            if nbytes < np.inf:
                squares = least[window] + ((sums[end] - sums[window]) / share) ** 2
                squares[fewest[window] > nbytes] = np.inf
                start_of[end] = earliest[end] + squares.argmin()
                fewest_now[end], least_now[end] = nbytes + crossed[end], squares.min()
        fewest, least = fewest_now, least_now
        starts.append(start_of)
    if np.isinf(fewest[-1]):
        return None
    boundaries = [len(sums) - 1]
    for start_of in reversed(starts):
        boundaries.insert(0, int(start_of[boundaries[0]]))
    return boundaries[1:-1]
