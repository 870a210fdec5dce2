"""Which runs of a program are waited for, to see whether memory lasted: those that may need more than any before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

FIRST: Final = 3
"""Runs of a program that are always waited for: GPUs capture graphs in them."""

GROWTH: Final = 1.1
"""Growth of the number of buffers, such as by the states of an optimizer, with which a run is waited for again."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What the memory that a run needs depends on, besides its program."""

    op_by_op: bool
    sizes: tuple[int, ...]
    """The numbers of the program's symbols."""
    buffers: int
    """Number of buffers that live beside the run."""


@dataclass(slots=True)
class MemoryWatch:
    """The runs of one program that have fitted in memory."""

    _runs: dict[bool, int] = field(default_factory=dict[bool, int])
    _largest: dict[bool, MemoryUse] = field(default_factory=dict[bool, MemoryUse])

    def is_due(self, use: MemoryUse) -> bool:
        """Whether a run may need more memory than those that were waited for."""
        largest = self._largest.get(use.op_by_op)
        if largest is None or self._runs[use.op_by_op] < FIRST or use.buffers > GROWTH * largest.buffers:
            return True
        return any(size > known for size, known in zip(use.sizes, largest.sizes, strict=True))

    def fitted(self, use: MemoryUse) -> None:
        """Takes note of a run that was waited for and has fitted."""
        known = self._largest.get(use.op_by_op, use)
        sizes = tuple(map(max, known.sizes, use.sizes))
        self._runs[use.op_by_op] = self._runs.get(use.op_by_op, 0) + 1
        self._largest[use.op_by_op] = MemoryUse(use.op_by_op, sizes, max(known.buffers, use.buffers))
