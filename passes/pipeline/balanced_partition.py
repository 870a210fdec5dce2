"""Partition a sequence of costs into consecutive pieces.

The largest piece is minimal, up to some slack, then the bytes that cross are, then the pieces are most alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

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

    Of several the one with the least sum of squared costs.
    """
    positions = len(prefix_sums) - 1
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for piece in range(pieces - 1):
        reached: dict[int, tuple[float, float, list[int]]] = {}
        for start, (nbytes, squares, boundaries) in best.items():
            for end in range(start + 1, positions - (pieces - 2 - piece)):
                if prefix_sums[end] - prefix_sums[start] > most:
                    break
                if _rest_fits(prefix_sums, end, pieces - 1 - piece, most):
                    more = (prefix_sums[end] - prefix_sums[start]) ** 2
                    option = (nbytes + crossing[end - 1], squares + more, [*boundaries, end])
                    reached[end] = min(reached.get(end, option), option)
        best = reached
    rest = {end: (prefix_sums[-1] - prefix_sums[end]) ** 2 for end in best}
    return min((nbytes, squares + rest[end], at) for end, (nbytes, squares, at) in best.items())[2]


def _rest_fits(prefix_sums: Sequence[float], start: int, pieces: int, most: float) -> bool:
    """Whether the remaining costs are at most `most` per piece on average."""
    return prefix_sums[-1] - prefix_sums[start] <= most * pieces
