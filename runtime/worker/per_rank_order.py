"""The order of one rank's instructions, which delays receives without deadlock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moaic.ir.collectives import SYNCHRONIZING
from moaic.ir.layout import Mesh
from moaic.ir.op_names import SEND
from moaic.ir.ops import takes_part
from moaic.runtime.protocol.shared_memory import SLOT_BYTES
from moaic.runtime.worker.overlap_and_bucket import Placed


def rank_order(
    steps: Sequence[Placed], mesh: Mesh, at: Mapping[str, int], slots: int, size: int = SLOT_BYTES
) -> list[Placed]:
    """The instructions of the rank at coordinates `at`; its sends fill up to `slots` slots of `size` bytes unreceived.

    A receive is delayed until its result is used, but not past a collective, nor past a send that may find no free
    slot until peers have received earlier sends of this rank:

        send a -> 1; recv b <- 1; f(); g(b)   ->   send a -> 1; f(); recv b <- 1; g(b)

    No two ranks deadlock: take the first instruction of the shared list that has not run. All before it have run, so
    it can run.
    """
    order: list[Placed] = []
    delayed: list[int] = []
    sent: list[int] = []
    for index, (_, op) in enumerate(steps):
        if not takes_part(op, at):
            continue
        if op.name == SEND and op.results[0].type.layout.holds(at):
            delayed.append(index)
            continue
        before = index if op.name in SYNCHRONIZING else 0
        if op.name == SEND:
            sent.append(index)
            before = _must_be_received(steps, mesh, sent, slots, size)
        wanted = set(op.inputs())
        due = [n for n, receive in enumerate(delayed) if receive < before or wanted & set(steps[receive].op.results)]
        count = max(due, default=-1) + 1
        order += [*(steps[receive] for receive in delayed[:count]), steps[index]]
        del delayed[:count]
    return order + [steps[receive] for receive in delayed]


def _must_be_received(steps: Sequence[Placed], mesh: Mesh, sent: Sequence[int], slots: int, size: int) -> int:
    """The last of a rank's sends that must be received before the newest surely finds free slots; 0 for none."""
    for index in reversed(sent):
        slots -= -(-steps[index].op.results[0].type.local_nbytes(mesh) // size)
        if slots < 0:
            return index
    return 0
