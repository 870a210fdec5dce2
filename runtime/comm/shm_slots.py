"""Memory shared by the workers of one host: slots for data, mailboxes, and a line where each says what it does.

The memory is an anonymous file handed down by descriptor, so nothing of it outlives the processes. Layout: one status
line per worker, a few lines per ordered pair, then the slots of each worker. A worker writes into a slot of its own,
posts it to some peers, and may write into the same slot again once each of them has given it back. Every word has one
writer. Counts only grow, so that no pair needs to know what other pairs did.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import select
import threading
import time
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from moaic.runtime.dtypes import DTYPES
from moaic.runtime.host.status import BEAT, DEVICE_BYTES, FAILED, STEP_TIME, STEPS, WORDS
from moaic.runtime.protocol.shared_memory import (
    AHEAD,
    ASLEEP,
    GIVEN_UP,
    LEVEL,
    MET,
    PAIR,
    POSTED,
    RETURNED,
    ROOT,
    SLOT_BYTES,
    SLOTS,
    TURNS,
    WHERE,
    memory_bytes,
    slots_start,
)

SPINS: Final = 200
YIELD_SECONDS: Final = 0.002
SLEEP_SECONDS: Final = 0.005
LIFE_SECONDS: Final = 0.05
"""A waiting worker spins this often, then yields its core for this long, then sleeps by pieces, and asks after its
peers at the last interval."""

NOBODY: Final[tuple[Sequence[int], int]] = ((), -1)
"""Whom a worker meets that is alone with its command."""

FUTEX_CALLS: Final = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
FUTEX_WAIT: Final = 0
FUTEX_WAKE: Final = 1


class PeerLost(Exception):
    """A peer failed or ended while this worker waited for it: a consequence, never the cause."""


class GivenUp(Exception):
    """A peer has given up the command that this worker does with it: to be agreed on, then both go on."""


class Mailbox:
    """One worker's side of the shared memory."""

    def __init__(self, descriptor: int, rank: int, ranks: int, lifelines: Sequence[int], spins: int = SPINS) -> None:
        """`lifelines` are descriptors that reach their end when one of the other workers does."""
        self.rank = rank
        self.ranks = ranks
        self._map = mmap.mmap(descriptor, memory_bytes(ranks))
        self._words = memoryview(self._map).cast("q")
        self._slots = _slots(self._map, ranks)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._lives = select.poll()
        for lifeline in lifelines:
            self._lives.register(lifeline, select.POLLIN)
        self._spins = spins
        self._slot = 0
        self._asked = {TURNS: 0, AHEAD: 0}
        self._owed: list[list[tuple[int, int]]] = [[] for _ in range(SLOTS)]
        self._posted = [0] * ranks
        self._taken = [0] * ranks
        self._together = NOBODY
        self._fence = Fence()

    def begin(self, line: int, code: int, subject: int) -> None:
        """Writes down what this worker does now, for the case that it does not live to tell."""
        at = self.rank * WORDS
        self._words[at], self._words[at + 1], self._words[at + 2], self._words[at + 3] = line, code, subject, -1

    def step(self, index: int) -> None:
        self._words[self.rank * WORDS + 3] = index

    def finish_step(self, seconds: float) -> None:
        """Counts a training step, and says how long it took."""
        at = self.rank * WORDS
        self._words[at + STEPS] += 1
        self._words[at + STEP_TIME] = int(1e6 * seconds)

    def beat(self, device_bytes: int) -> None:
        """Gives a sign of life, and says what it has on a device with memory of its own."""
        at = self.rank * WORDS
        self._words[at + DEVICE_BYTES] = device_bytes
        self._words[at + BEAT] += 1

    def fail(self) -> None:
        """Lets no peer wait for this worker any longer."""
        self._words[self.rank * WORDS + FAILED] = 1

    def slot(self, dtype: torch.dtype, among: range = TURNS) -> Tensor:
        """This worker's next slot, once all its readers have given it back. Raises PeerLost."""
        self._slot = among[self._asked[among] % len(among)]
        self._asked[among] += 1
        owed = self._owed[self._slot]
        for peer, count in owed:
            self._await(peer, RETURNED, count)
        owed.clear()
        return self._slots[self.rank][self._slot][dtype]

    def post(self, peers: Sequence[int]) -> None:
        """Shows the slot last asked for to `peers`."""
        self._fence.pass_through()
        for peer in peers:
            at = self._line(self.rank, peer)
            count = self._posted[peer] = self._posted[peer] + 1
            self._words[at + WHERE + count % SLOTS] = self._slot
            self._set(peer, at + POSTED, count)
            self._owed[self._slot].append((peer, count))

    def take(self, peer: int, dtype: torch.dtype) -> Tensor:
        """The next slot that `peer` shows to this worker; to be read, then given back. Raises PeerLost."""
        count = self._taken[peer] = self._taken[peer] + 1
        self._await(peer, POSTED, count)
        self._fence.pass_through()
        return self._slots[peer][self._words[self._line(peer, self.rank) + WHERE + count % SLOTS]][dtype]

    def give_back(self, peers: Sequence[int]) -> None:
        """Tells `peers` that the slots taken from them have been read."""
        self._fence.pass_through()
        for peer in peers:
            self._set(peer, self._line(self.rank, peer) + RETURNED, self._taken[peer])

    def agree(self, peers: Sequence[int], choice: int) -> bool:
        """Whether all `peers`, who ask at the same time, have chosen as this worker has. Raises PeerLost."""
        self.slot(torch.uint8)[0] = choice
        self.post(peers)
        theirs = [int(self.take(peer, torch.uint8)[0]) for peer in peers]
        self.give_back(peers)
        return all(each == choice for each in theirs)

    def meet(self, peers: Sequence[int], command: int) -> None:
        """From now until they `part` whoever waits for one of these learns that one of them has given up."""
        self._together = (peers, command)

    def part(self, root: int | None) -> int | None:
        """Meets the same peers at the command's end; the first command to blame if one of them has given it up.

        A worker does that by a `root`, the number of the command to blame. Raises PeerLost.
        """
        (peers, command), self._together = self._together, NOBODY
        roots = [] if root is None else [root]
        for peer in peers if roots else ():
            at = self._line(self.rank, peer)
            self._words[at + ROOT], self._words[at + GIVEN_UP] = roots[0], command
        self._wait_for_all(peers, MET, command)
        lines = [self._line(peer, self.rank) for peer in peers]
        roots += [self._words[at + ROOT] for at in lines if self._words[at + GIVEN_UP] == command]
        found = min(roots) if roots else None
        if found is not None:
            self._level(peers, command)
        return found

    def _level(self, peers: Sequence[int], command: int) -> None:
        """Forgets what was shown and not taken, as all peers do before one of them shows anything again."""
        for peer in peers:
            self._taken[peer] = self._words[self._line(peer, self.rank) + POSTED]
        self.give_back(peers)
        self._wait_for_all(peers, LEVEL, command)

    def _wait_for_all(self, peers: Sequence[int], word: int, command: int) -> None:
        self._fence.pass_through()
        for peer in peers:
            self._set(peer, self._line(self.rank, peer) + word, command)
        for peer in peers:
            self._await(peer, word, command)
        self._fence.pass_through()

    def _line(self, writer: int, reader: int) -> int:
        return WORDS * (self.ranks + PAIR * (writer * self.ranks + reader))

    def _set(self, peer: int, at: int, value: int) -> None:
        self._words[at] = value
        if self._words[self._line(peer, self.rank) + ASLEEP]:
            futex(self._address + 8 * at, FUTEX_WAKE, 1, 0.0)

    def _await(self, peer: int, word: int, count: int) -> None:
        words, at = self._words, self._line(peer, self.rank) + word
        for _ in range(self._spins):
            if words[at] >= count:
                return
        start = time.monotonic()
        while words[at] < count and time.monotonic() - start < YIELD_SECONDS:
            os.sched_yield()
        self._sleep(peer, at, count)

    def _sleep(self, peer: int, at: int, count: int) -> None:
        asked = time.monotonic()
        asleep = self._line(self.rank, peer) + ASLEEP
        while (seen := self._words[at]) < count:
            # A wake-up can be missed between these two lines; the time limit of the sleep bounds what that costs.
            self._words[asleep] = 1
            futex(self._address + 8 * at, FUTEX_WAIT, seen & 0xFFFFFFFF, SLEEP_SECONDS)
            now = time.monotonic()
            if now - asked > LIFE_SECONDS:
                asked = now
                self._check_peers()
        self._words[asleep] = 0

    def _check_peers(self) -> None:
        failed = [rank for rank in range(self.ranks) if self._words[rank * WORDS + FAILED]]
        if failed or self._lives.poll(0):
            raise PeerLost(f"worker {failed[0]} failed" if failed else "another worker ended")
        peers, command = self._together
        if any(self._words[self._line(peer, self.rank) + GIVEN_UP] == command for peer in peers):
            raise GivenUp


class Fence:
    """Orders the memory accesses of this thread. Free on x86, where stores are seen in order and loads stay so."""

    def __init__(self) -> None:
        self._ordered = platform.machine() in ("x86_64", "AMD64")
        self._lock = threading.Lock()

    def pass_through(self) -> None:
        if self._ordered:
            return
        # Nothing moves up over the end of the second locking or down over the start of the first.
        with self._lock:
            pass
        with self._lock:
            pass


def futex(address: int, operation: int, value: int, seconds: float) -> None:
    """Sleeps on, or wakes sleepers of, the 32-bit word at `address`; elsewhere than on Linux as we know it, a nap."""
    number = FUTEX_CALLS.get(platform.machine())
    if number is None:
        time.sleep(min(seconds, 0.0005))
        return
    limit = _Timespec(0, int(seconds * 1e9))
    if (
        _LIBC.syscall(number, ctypes.c_void_p(address), operation, ctypes.c_uint32(value), ctypes.byref(limit), None, 0)
        < 0
    ):
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            raise OSError(code, os.strerror(code))


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def _slots(memory: mmap.mmap, ranks: int) -> list[list[dict[torch.dtype, Tensor]]]:
    slots = torch.frombuffer(memory, dtype=torch.uint8)[slots_start(ranks) :].view(ranks, SLOTS, SLOT_BYTES)
    return [[{dtype: slot.view(dtype) for dtype in DTYPES.values()} for slot in of_rank] for of_rank in slots]
