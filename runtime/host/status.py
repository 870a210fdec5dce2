"""The lines in which the workers of a host say what they do, for whoever starts them and for tools that look on.

They are the beginning of the workers' shared memory, cache lines of each worker's own, so that writing them costs
nothing and reading them disturbs nobody.
"""

from __future__ import annotations

import mmap
import os
from typing import Final, NamedTuple

LINE: Final = 128
"""Bytes of the two cache lines that processors fetch together; words of different writers never share them."""

WORDS: Final = LINE // 8


class Activity(NamedTuple):
    """What a worker does, as four numbers that whoever starts it can look up."""

    line: int
    """Line of the person's program, as `location.Lines` numbers them."""
    code: int
    """Kind of command."""
    subject: int
    """The operation, conversion or program that it names."""
    step: int
    """Instruction of the program."""


IDLE: Final = Activity(-1, -1, -1, -1)

FAILED: Final = 4
"""Word of a status line that is 1 once the worker has failed."""

BEAT: Final = 5
"""Word of a status line: how many signs of life the worker has given."""

STEPS: Final = 6
"""Word of a status line: how many times the worker has made gradients."""

STEP_TIME: Final = 7
"""Word of a status line: microseconds from the end of the step before to the end of the last one."""

DEVICE_BYTES: Final = 8
"""Word of a status line: bytes that tensors take of a memory that is not the host's."""


class Status:
    """The status lines, seen by whoever started the workers or has the descriptor of their memory."""

    def __init__(self, descriptor: int, ranks: int) -> None:
        """Keeps a descriptor of its own."""
        self.descriptor = os.dup(descriptor)
        self._map = mmap.mmap(self.descriptor, LINE * ranks, access=mmap.ACCESS_READ)
        self._words = memoryview(self._map).cast("q")

    def activity(self, rank: int) -> Activity:
        at = rank * WORDS
        return Activity(*self._words[at : at + len(IDLE)])

    def beats(self, rank: int) -> int:
        """Signs of life that `rank` has given."""
        return self._words[rank * WORDS + BEAT]

    def steps(self, rank: int) -> int:
        """Training steps that `rank` has taken part in."""
        return self._words[rank * WORDS + STEPS]

    def step_seconds(self, rank: int) -> float:
        """How long the last of these took; 0 before there was one."""
        return self._words[rank * WORDS + STEP_TIME] / 1e6

    def device_bytes(self, rank: int) -> int:
        """Bytes that it has on a device with memory of its own; 0 where it computes in the host's."""
        return self._words[rank * WORDS + DEVICE_BYTES]

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self.descriptor)
