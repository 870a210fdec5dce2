"""Memory shared by the workers of a host: slots for data, a mailbox per pair, and a status line per worker.

The memory is an anonymous file inherited by descriptor, so it does not outlive the processes. Layout: one status line
per worker, a few lines per ordered pair, then the slots of each worker. A worker writes into one of its slots, posts it
to some peers, and may reuse the slot once each of them has given it back. Every word has one writer. Counts only grow,
and are per pair, so pairs are independent of each other.

Several hosts each have such a memory, for the workers of all. What a worker writes for one of another host goes there
over a link (`peer_links`), to the same place: so one transport serves groups on one host, on several, and on both.
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

from moaic.runtime.comm.peer_links import BadLink, PeerLinks
from moaic.runtime.dtypes import DTYPES
from moaic.runtime.host.status import (
    BEAT,
    COMPILED,
    COMPILING,
    CORES,
    DEVICE_BYTES,
    FAILED,
    RESIDENT,
    STEP_TIME,
    STEPS,
    WORDS,
)
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
"""A waiting worker spins `SPINS` times, yields its core for `YIELD_SECONDS`, then sleeps `SLEEP_SECONDS` at a time; it
checks whether its peers are alive every `LIFE_SECONDS`."""

NOBODY: Final[tuple[Sequence[int], int]] = ((), -1)
"""The peers, none, of a worker that runs a command alone."""

FUTEX_CALLS: Final = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
FUTEX_WAIT: Final = 0
FUTEX_WAKE: Final = 1


class PeerLost(Exception):
    """A peer failed or ended while this worker waited for it: a secondary error, never the root cause."""


class GivenUp(Exception):
    """A peer has given up the command that this worker runs with it: both agree on that, then go on."""


class Mailbox:
    """One worker's side of the shared memory."""

    def __init__(
        self,
        descriptor: int,
        rank: int,
        ranks: int,
        liveness_pipes: Sequence[int],
        spins: int = SPINS,
        links: PeerLinks | None = None,
    ) -> None:
        """`liveness_pipes` are pipes (descriptors), each of which closes when one of this host's other workers ends.

        `links` lead to the workers of other hosts, if there are any.
        """
        self.rank = rank
        self.ranks = ranks
        self._map = mmap.mmap(descriptor, memory_bytes(ranks))
        self._words = memoryview(self._map).cast("q")
        self._slots = _slots(self._map, ranks)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._lives = select.poll()
        for pipe in liveness_pipes:
            self._lives.register(pipe, select.POLLIN)
        self._spins = spins
        self._slot = 0
        self._asked = {TURNS: 0, AHEAD: 0}
        self._owed: list[list[tuple[int, int]]] = [[] for _ in range(SLOTS)]
        self._posted = [0] * ranks
        self._taken = [0] * ranks
        self._together = NOBODY
        self._fence = Fence()
        self._links = links
        self._far = frozenset[int]() if links is None else links.far
        self.local: Final = tuple(each for each in range(ranks) if each not in self._far)
        """The workers of this one's host."""
        if links is not None:
            self._bytes = memoryview(self._map)
            links.listen(self._place, self._store)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each worker; of one host alone, without a name."""
        return ("",) * self.ranks if self._links is None else self._links.hosts

    def begin(self, line: int, code: int, subject: int) -> None:
        """Record the command that this worker runs now, for a report if the worker dies in it."""
        at = self.rank * WORDS
        self._words[at], self._words[at + 1], self._words[at + 2], self._words[at + 3] = line, code, subject, -1

    def step(self, index: int) -> None:
        self._words[self.rank * WORDS + 3] = index

    def finish_step(self, seconds: float) -> None:
        """Count a training step and record its time."""
        at = self.rank * WORDS
        self._words[at + STEPS] += 1
        self._words[at + STEP_TIME] = int(1e6 * seconds)

    def begin_compiling(self) -> None:
        """Count a program that is to be compiled in the background."""
        self._words[self.rank * WORDS + COMPILING] += 1

    def finish_compiling(self) -> None:
        """Count a program whose compilation in the background has ended."""
        self._words[self.rank * WORDS + COMPILED] += 1

    def beat(self, device_bytes: int, millicores: int = 0, resident_bytes: int = 0) -> None:
        """Increment the heartbeat, and record the bytes on a device with memory of its own and what this process uses.

        That is thousandths of a core since the last heartbeat, and bytes of the host's memory.
        """
        at = self.rank * WORDS
        self._words[at + DEVICE_BYTES] = device_bytes
        self._words[at + CORES] = millicores
        self._words[at + RESIDENT] = resident_bytes
        self._words[at + BEAT] += 1

    def fail(self) -> None:
        """Mark this worker failed, so that waiting peers raise PeerLost."""
        at = self.rank * WORDS + FAILED
        self._words[at] = 1
        if self._links is not None:
            self._links.write_all([(at, 1)])

    def slot(self, dtype: torch.dtype, among: range = TURNS) -> Tensor:
        """Return this worker's next slot, once all its readers have given it back. Raises PeerLost."""
        self._slot = among[self._asked[among] % len(among)]
        self._asked[among] += 1
        owed = self._owed[self._slot]
        for peer, count in owed:
            self._await(peer, RETURNED, count)
        owed.clear()
        return self._slots[self.rank][self._slot][dtype]

    def post(self, peers: Sequence[int], nbytes: int, *, apart: bool = False) -> None:
        """Post the slot last returned by `slot` to `peers`, which read its first bytes.

        If they read `apart`, each reads `nbytes` of its own, one after the other. Raises PeerLost and Unreachable.
        """
        self._fence.pass_through()
        for index, peer in enumerate(peers):
            at = self._line(self.rank, peer)
            count = self._posted[peer] = self._posted[peer] + 1
            self._owed[self._slot].append((peer, count))
            words = (at + WHERE + count % SLOTS, self._slot), (at + POSTED, count)
            if peer in self._far:
                start = self._start(self.rank, self._slot) + (index * nbytes if apart else 0)
                self._send(peer, words, start, nbytes)
            else:
                self._words[words[0][0]] = self._slot
                self._set(peer, *words[1])

    def take(self, peer: int, dtype: torch.dtype) -> Tensor:
        """Wait for the next slot that `peer` posts, to be read and then given back. Raises PeerLost."""
        count = self._taken[peer] = self._taken[peer] + 1
        self._await(peer, POSTED, count)
        self._fence.pass_through()
        return self._slots[peer][self._words[self._line(peer, self.rank) + WHERE + count % SLOTS]][dtype]

    def give_back(self, peers: Sequence[int]) -> None:
        """Give the slots taken from `peers` back to them."""
        self._fence.pass_through()
        for peer in peers:
            self._set(peer, self._line(self.rank, peer) + RETURNED, self._taken[peer])

    def agree(self, peers: Sequence[int], choice: int) -> bool:
        """Whether all `peers`, which all call this, have made the same choice as this worker. Raises PeerLost."""
        self.slot(torch.uint8)[0] = choice
        self.post(peers, 1)
        theirs = [int(self.take(peer, torch.uint8)[0]) for peer in peers]
        self.give_back(peers)
        return all(each == choice for each in theirs)

    def meet(self, peers: Sequence[int], command: int) -> None:
        """Begin a command together: until `part`, waiting for one of `peers` raises GivenUp if one has given up."""
        self._together = (peers, command)

    def part(self, root: int | None) -> int | None:
        """End the command together; return the root command if one of the peers has given it up, else None.

        A worker gives the command up by passing a `root`: the number of the command whose error is the cause. The
        smallest root of all workers is returned. Raises PeerLost.
        """
        (peers, command), self._together = self._together, NOBODY
        roots = [] if root is None else [root]
        for peer in peers if roots else ():
            at = self._line(self.rank, peer)
            self._give_up(peer, [(at + ROOT, roots[0]), (at + GIVEN_UP, command)])
        self._wait_for_all(peers, MET, command)
        lines = [self._line(peer, self.rank) for peer in peers]
        roots += [self._words[at + ROOT] for at in lines if self._words[at + GIVEN_UP] == command]
        found = min(roots) if roots else None
        if found is not None:
            self._discard_posted(peers, command)
        return found

    def _discard_posted(self, peers: Sequence[int], command: int) -> None:
        """Give back, on all peers, the slots that were posted and not taken, before a peer posts another."""
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

    def _give_up(self, peer: int, words: Sequence[tuple[int, int]]) -> None:
        if peer in self._far:
            self._send(peer, words)
        else:
            for at, value in words:
                self._words[at] = value

    def _line(self, writer: int, reader: int) -> int:
        return WORDS * (self.ranks + PAIR * (writer * self.ranks + reader))

    def _set(self, peer: int, at: int, value: int) -> None:
        if peer in self._far:
            self._send(peer, [(at, value)])
            return
        self._words[at] = value
        if self._words[self._line(peer, self.rank) + ASLEEP]:
            futex(self._address + 8 * at, FUTEX_WAKE, 1, 0.0)

    def _await(self, peer: int, word: int, count: int) -> None:
        words, at = self._words, self._line(peer, self.rank) + word
        if peer in self._far:
            # A thread of this process writes the word: it must get to run.
            self._sleep(peer, at, count)
            return
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
            # A wake-up between these two lines is lost; the sleep then takes its full time.
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
        if self._links is not None and self._links.lost:
            raise PeerLost(self._links.lost)
        peers, command = self._together
        if any(self._words[self._line(peer, self.rank) + GIVEN_UP] == command for peer in peers):
            raise GivenUp

    # Workers of other hosts.

    def _send(self, peer: int, words: Sequence[tuple[int, int]], start: int = 0, nbytes: int = 0) -> None:
        """Write words, and bytes from `start` of this memory on, into the memory of another host."""
        assert self._links is not None
        try:
            self._links.write(peer, words, start, self._bytes[start : start + nbytes])
        except OSError as error:
            raise PeerLost(f"the link to worker {peer} has ended: {error}") from error

    def _start(self, rank: int, slot: int) -> int:
        return slots_start(self.ranks) + (rank * SLOTS + slot) * SLOT_BYTES

    def _place(self, sender: int, at: int, nbytes: int) -> memoryview:
        """The memory of a sender's slots, of which it may write some bytes. Runs on a thread of a link."""
        if not self._start(sender, 0) <= at <= at + nbytes <= self._start(sender + 1, 0):
            raise BadLink(f"worker {sender} would write {nbytes} bytes where its slots are not")
        return self._bytes[at : at + nbytes]

    def _store(self, sender: int, words: Sequence[tuple[int, int]]) -> None:
        """Write the words of a sender and wake this worker. Runs on a thread of a link."""
        line = self._line(sender, self.rank)
        self._fence.pass_through()
        for at, value in words:
            if not line <= at < line + PAIR * WORDS and at != sender * WORDS + FAILED:
                raise BadLink(f"worker {sender} would write a word that is not its own")
            self._words[at] = value
            if self._words[self._line(self.rank, sender) + ASLEEP]:
                futex(self._address + 8 * at, FUTEX_WAKE, 1, 0.0)


class Fence:
    """Orders the memory accesses of this thread. A no-op on x86, which does not reorder stores, nor loads."""

    def __init__(self) -> None:
        self._ordered = platform.machine() in ("x86_64", "AMD64")
        self._lock = threading.Lock()

    def pass_through(self) -> None:
        if self._ordered:
            return
        # Earlier accesses stay before the first release, later ones after the second acquire.
        with self._lock:
            pass
        with self._lock:
            pass


def futex(address: int, operation: int, value: int, seconds: float) -> None:
    """Sleep on the 32-bit word at `address`, or wake its sleepers; a short sleep if the futex call is not known."""
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
