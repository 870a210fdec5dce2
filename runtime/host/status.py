"""Status lines of the workers of a host, read by the controller and by tools.

They are at the beginning of the workers' shared memory. Each worker has cache lines of its own, so writing is cheap,
and reading does not slow other workers down.
"""

from __future__ import annotations

import mmap
import os
from typing import Final, NamedTuple

LINE: Final = 128
"""Bytes of the two cache lines that processors fetch together; words of different writers are in different ones."""

WORDS: Final = LINE // 8


class Activity(NamedTuple):
    """The current activity of a worker, as four numbers that the controller can look up."""

    line: int
    """Line of the user's program, as `source_lines.SourceLines` numbers it."""
    code: int
    """Kind of command."""
    subject: int
    """Number of the operation, conversion or program."""
    step: int
    """Index of the program's instruction."""


IDLE: Final = Activity(-1, -1, -1, -1)

FAILED: Final = 4
"""Word of a status line that is 1 once the worker has failed."""

BEAT: Final = 5
"""Word of a status line: the heartbeat, a count."""

STEPS: Final = 6
"""Word of a status line: the number of programs with gradients that the worker has run."""

STEP_TIME: Final = 7
"""Word of a status line: microseconds between the ends of the last two training steps."""

DEVICE_BYTES: Final = 8
"""Word of a status line: bytes of tensors on a device with memory of its own."""


COMPILED: Final = 9
"""Word of a status line: the number of programs whose compilation in the background has ended, in order of Load."""

COMPILING: Final = 10
"""Word of a status line: the number of programs to be compiled in the background so far, ended ones among them."""

CORES: Final = 11
"""Word of a status line: thousandths of a core that the worker has used between its last two heartbeats."""

RESIDENT: Final = 12
"""Word of a status line: bytes of private and of shared memory at the last heartbeat."""


class Status:
    """Reads the status lines by the descriptor of the workers' shared memory."""

    def __init__(self, descriptor: int, ranks: int) -> None:
        """Duplicates the descriptor."""
        self.descriptor = os.dup(descriptor)
        self._map = mmap.mmap(self.descriptor, LINE * ranks, access=mmap.ACCESS_READ)
        self._words = memoryview(self._map).cast("q")

    def lines(self, first: int, count: int) -> bytes:
        """The status lines of consecutive ranks."""
        return self._map[LINE * first : LINE * (first + count)]

    def activity(self, rank: int) -> Activity:
        at = rank * WORDS
        return Activity(*self._words[at : at + len(IDLE)])

    def beats(self, rank: int) -> int:
        """The heartbeat count of `rank`."""
        return self._words[rank * WORDS + BEAT]

    def steps(self, rank: int) -> int:
        """The number of training steps of `rank`."""
        return self._words[rank * WORDS + STEPS]

    def step_seconds(self, rank: int) -> float:
        """The duration of the last training step; 0 before there is one."""
        return self._words[rank * WORDS + STEP_TIME] / 1e6

    def device_bytes(self, rank: int) -> int:
        """The bytes of tensors of `rank` on a device with memory of its own; 0 if it computes in the host's."""
        return self._words[rank * WORDS + DEVICE_BYTES]

    def compiled(self, rank: int) -> int:
        """The number of programs that `rank` has finished compiling in the background."""
        return self._words[rank * WORDS + COMPILED]

    def compiling(self, rank: int) -> int:
        """The number of programs that `rank` was to compile in the background so far."""
        return self._words[rank * WORDS + COMPILING]

    def cores(self, rank: int) -> float:
        """The cores in use by `rank` between its last two heartbeats: seconds of computing per second."""
        return self._words[rank * WORDS + CORES] / 1000

    def resident_bytes(self, rank: int) -> int:
        """The bytes of private and of shared memory of `rank` at its last heartbeat; 0 before there is one."""
        return self._words[rank * WORDS + RESIDENT]

    def mirror(self, first: int, lines: bytes) -> None:
        """Write the status lines of consecutive ranks of another host into this memory."""
        for at in range(0, len(lines), LINE):
            # Between them is FAILED, which a link may have written later than these lines.
            for begin, end in ((0, FAILED), (FAILED + 1, WORDS)):
                words = lines[at + 8 * begin : at + 8 * end]
                os.pwrite(self.descriptor, words, LINE * first + at + 8 * begin)

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self.descriptor)
