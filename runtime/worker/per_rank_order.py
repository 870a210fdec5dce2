"""The order in which one worker does its part of a program, so that no two wait for each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moaic.ir.collectives import SYNCHRONIZING
from moaic.ir.layout import Mesh
from moaic.ir.op_names import SEND
from moaic.ir.ops import takes_part
from moaic.runtime.protocol.shared_memory import SLOT_BYTES
from moaic.runtime.worker.overlap_and_bucket import Placed


def own_order(
    steps: Sequence[Placed], mesh: Mesh, at: Mapping[str, int], slots: int, size: int = SLOT_BYTES
) -> list[Placed]:
    """The instructions of the rank at these coordinates; what it sends may fill `slots` of `size` bytes untaken.

    What it is sent it takes in when it is needed, but before what all ranks of an axis do together, and before a send
    for which there may be no slot until others have taken what this rank sent before. So no two can wait for each
    other: all that comes before the first instruction of the one list that is not done is done, thus that one can be
    done.
    """
    order: list[Placed] = []
    arriving: list[int] = []
    sent: list[int] = []
    for index, (_, op) in enumerate(steps):
        if not takes_part(op, at):
            continue
        if op.name == SEND and op.results[0].type.layout.holds(at):
            arriving.append(index)
            continue
        before = index if op.name in SYNCHRONIZING else 0
        if op.name == SEND:
            sent.append(index)
            before = _must_be_taken(steps, mesh, sent, slots, size)
        wanted = set(op.inputs())
        taken = [n for n, each in enumerate(arriving) if each < before or wanted & set(steps[each].op.results)]
        count = max(taken, default=-1) + 1
        order += [*(steps[each] for each in arriving[:count]), steps[index]]
        del arriving[:count]
    return order + [steps[each] for each in arriving]


def _must_be_taken(steps: Sequence[Placed], mesh: Mesh, sent: Sequence[int], slots: int, size: int) -> int:
    """The last of a rank's sends that must be taken before there is surely slot for the newest; 0 for none."""
    for index in reversed(sent):
        slots -= -(-steps[index].op.results[0].type.local_nbytes(mesh) // size)
        if slots < 0:
            return index
    return 0
