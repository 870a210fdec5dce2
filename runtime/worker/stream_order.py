"""Proofs about the instruction lists of ranks: streams wait for each other, and all ranks communicate in one order.

A device has two streams: instructions run on the first in the order of the list, and asynchronous collectives on a
side stream, also in that order. A collective begins after all that the list has before it; nothing waits for it but
the first instruction that awaits its result. Memory goes back at the last use that the list names.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from moaic.ir.collectives import COMMUNICATING
from moaic.ir.graph import Function, Op, Value
from moaic.ir.layout import Mesh
from moaic.ir.op_names import SEND
from moaic.ir.ring_attention import is_ring
from moaic.runtime.codegen.lower_to_fx import last_uses
from moaic.runtime.comm.device_backend import BEHIND
from moaic.runtime.worker.instructions import Instruction
from moaic.runtime.worker.overlap_and_bucket import Placed
from moaic.runtime.worker.per_rank_order import rank_order


class DisorderedError(AssertionError):
    """A list that could read a value too early, give memory away too soon, or block for ever."""


MANY: Final = 64
"""Most ranks whose lists are compared when one of them is loaded."""


def check_streams(instructions: Sequence[Instruction], given: Sequence[int], wanted: Sequence[int]) -> None:
    """Raises DisorderedError if one rank's list reads, awaits or frees a slot at a wrong place.

    `given` are the slots that hold operands at the start, `wanted` those that are read at the end.
    """
    ready, running, freed = set(given), set[int](), set[int]()
    unread = set(given)
    for number, each in enumerate(instructions):
        here = f"instruction {number}"
        _require(_once(each.awaits) and _once(each.frees), here, "waits or frees twice", (each.awaits, each.frees))
        _require(set(each.awaits) <= running, here, "awaits what does not run", set(each.awaits) - running)
        running.difference_update(each.awaits)
        ready.update(each.awaits)
        _require(not freed.intersection(each.reads), here, "reads what was freed", freed.intersection(each.reads))
        _require(not running.intersection(each.reads), here, "does not wait for", running.intersection(each.reads))
        _require(set(each.reads) <= ready, here, "reads what is not yet made", set(each.reads) - ready)
        _require(set(each.frees) <= set(each.reads), here, "frees what it does not read", each.frees)
        ready.difference_update(each.frees)
        freed.update(each.frees)
        unread.difference_update(each.reads)
        made = {slot for slot in each.writes if slot >= 0}
        _require(not made & (ready | running | freed), here, "writes again", made & (ready | running | freed))
        (running if each.is_async else ready).update(made)
    lost = running - set(wanted)
    _require(not lost, "the end", "comes before somebody waits for", lost)
    missing = set(wanted) - ready - running
    _require(not missing, "the end", "reads what was freed or never made", missing)
    kept = ready - set(wanted) - unread
    _require(not kept, "the end", "comes before memory is given back", kept)


def _once(slots: Sequence[int]) -> bool:
    return len(set(slots)) == len(slots)


def _require(holds: bool, where: str, what: str, slots: object) -> None:
    if not holds:
        raise DisorderedError(f"{where} {what}: slots {slots}")


class Communication(NamedTuple):
    """What one rank does in one instruction together with others."""

    position: int
    """Of the instruction in the list that all ranks share."""
    ranks: tuple[int, ...]
    is_async: bool = False
    sends: bool = False
    """Whether it posts a value; the receiver waits for it, and it waits for a free slot alone."""
    receives: bool = False
    awaits: tuple[int, ...] = ()
    """Positions of collectives that it waits for first."""


def communications(
    main: Function, steps: Sequence[Placed], mesh: Mesh, rank: int, *, is_asynchronous: bool
) -> list[Communication]:
    """What a rank's instructions exchange with others, in order; those that only wait are among them."""
    at, found, running = mesh.coordinates(rank), list[Communication](), dict[Value, int]()
    own = replace(main, ops=tuple(op for _, op in steps))
    for (position, op), dying in zip(steps, last_uses(own), strict=True):
        awaited = tuple(dict.fromkeys(running.pop(value) for value in op.inputs() if value in running))
        ranks = _together(op, mesh, rank)
        if op.name == SEND:
            receives = op.results[0].type.layout.holds(at)
            found.append(Communication(position, ranks, sends=not receives, receives=receives, awaits=awaited))
        elif len(ranks) > 1:
            is_async = is_asynchronous and op.name in COMMUNICATING and set(op.results).isdisjoint(dying)
            found.append(Communication(position, ranks, is_async, awaits=awaited))
            running.update(dict.fromkeys(op.results, position) if is_async else {})
        elif awaited:
            found.append(Communication(position, (rank,), awaits=awaited))
    return found


def _together(op: Op, mesh: Mesh, rank: int) -> tuple[int, ...]:
    """The ranks that run an instruction together with `rank`, itself among them."""
    if op.name == SEND:
        owners = (value.type.layout.owner_on(str(op.attrs["axis"])) for value in (*op.inputs(), *op.results))
        at = mesh.coordinates(rank)
        return tuple(mesh.rank({**at, str(op.attrs["axis"]): owner}) for owner in owners if owner is not None)
    if op.name in COMMUNICATING or is_ring(op):
        return tuple(mesh.group(rank, str(op.attrs["axis"])))
    return (rank,)


def check_ranks(by_rank: Mapping[int, Sequence[Communication]], slots: int) -> None:
    """Raises DisorderedError if ranks use a communicator in different orders, or wait for each other for ever.

    `slots` values may be sent before one is received. Each rank is simulated: its list, its side stream, and the limit
    of collectives in flight.
    """
    _check_communicators(by_rank)
    ranks = {rank: _Rank(deque(each)) for rank, each in by_rank.items()}
    while any(_advance(rank, ranks, slots) for rank in ranks):
        pass
    stuck = {rank: each.waits_for() for rank, each in ranks.items() if not each.is_done}
    if stuck:
        words = "; ".join(f"rank {rank} at instruction {at}" for rank, at in stuck.items())
        raise DisorderedError(f"ranks wait for each other for ever: {words}")


def _check_communicators(by_rank: Mapping[int, Sequence[Communication]]) -> None:
    """Libraries match the calls of a group by their number, whatever the stream."""
    orders: dict[tuple[int, ...], dict[int, list[int]]] = {}
    for rank, row in by_rank.items():
        for each in row:
            if len(each.ranks) > 1:
                orders.setdefault(each.ranks, {}).setdefault(rank, []).append(each.position)
    for ranks, found in orders.items():
        first, *others = (found.get(rank, []) for rank in ranks)
        if any(other != first for other in others):
            raise DisorderedError(f"the ranks {ranks} communicate in different orders: {first} and {others}")


@dataclass(slots=True)
class _Rank:
    """One rank while it is simulated."""

    left: deque[Communication]
    side: deque[Communication] = field(default_factory=deque[Communication])
    """The collectives on the side stream that are not over, in order."""
    posted: dict[int, int] = field(default_factory=dict[int, int])
    """Values that were sent and not yet received: by instruction, the receiver."""

    @property
    def is_done(self) -> bool:
        return not self.left and not self.side and not self.posted

    def waits_for(self) -> int:
        return (self.left or self.side)[0].position if self.left or self.side else next(iter(self.posted))

    def is_at(self, position: int) -> bool:
        """Whether one of its streams has come to a collective."""
        heads = [*list(self.side)[:1], *(list(self.left)[:1] if self._is_free() else ())]
        return any(each.position == position and not each.sends and not each.receives for each in heads)

    def receives_now(self, position: int) -> bool:
        """Whether it waits for a value that is sent to it."""
        return bool(self.left) and self._is_free() and self.left[0].position == position and self.left[0].receives

    def _is_free(self) -> bool:
        """Whether the first stream waits for nothing on the side stream."""
        return not self.left or {each.position for each in self.side}.isdisjoint(self.left[0].awaits)

    def may_begin(self) -> bool:
        return bool(self.left) and self._is_free() and not (self.left[0].is_async and len(self.side) >= BEHIND)


def _advance(rank: int, ranks: Mapping[int, _Rank], slots: int) -> bool:
    """One step of one rank; false where it has to wait, or is done."""
    mine = ranks[rank]
    if mine.side and _all_at(mine.side[0], ranks):
        _finish(mine.side[0], ranks)
        return True
    if not mine.may_begin():
        return False
    head = mine.left[0]
    if head.is_async:
        mine.side.append(mine.left.popleft())
        return True
    if head.sends:
        # Without a slot the sender goes on when its receiver has come.
        is_met = slots == 0 and ranks[head.ranks[-1]].receives_now(head.position)
        if len(mine.posted) >= slots and not is_met:
            return False
        mine.posted[head.position] = head.ranks[-1]
        mine.left.popleft()
        return True
    if head.receives:
        return _receive(head, mine, ranks)
    if len(head.ranks) == 1:
        mine.left.popleft()
        return True
    if not _all_at(head, ranks):
        return False
    _finish(head, ranks)
    return True


def _receive(head: Communication, mine: _Rank, ranks: Mapping[int, _Rank]) -> bool:
    sender = ranks[head.ranks[0]]
    if head.position not in sender.posted:
        return False
    del sender.posted[head.position]
    mine.left.popleft()
    return True


def _all_at(collective: Communication, ranks: Mapping[int, _Rank]) -> bool:
    return all(ranks[each].is_at(collective.position) for each in collective.ranks)


def _finish(collective: Communication, ranks: Mapping[int, _Rank]) -> None:
    for each in collective.ranks:
        rank = ranks[each]
        stream = rank.side if rank.side and rank.side[0].position == collective.position else rank.left
        stream.popleft()


def check_program(main: Function, arrange: Sequence[Placed], mesh: Mesh, slots: int) -> None:
    """Raises DisorderedError if the lists that ranks make of the shared one can block for ever."""
    lists = {rank: rank_order(arrange, mesh, mesh.coordinates(rank), slots) for rank in range(mesh.ranks)}
    check_ranks(
        {rank: communications(main, steps, mesh, rank, is_asynchronous=True) for rank, steps in lists.items()}, slots
    )
