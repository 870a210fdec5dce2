"""Slots of the shared memory: the number of sends ahead of the receiver."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import torch

from moaic.runtime.comm.shm_slots import Mailbox
from moaic.runtime.protocol.shared_memory import AHEAD, create_memory


def pair() -> tuple[Mailbox, Mailbox]:
    """Two workers' sides, here in one process."""
    memory = create_memory(2)
    sides = Mailbox(memory, 0, 2, ()), Mailbox(memory, 1, 2, ())
    os.close(memory)
    return sides


def test_a_sender_fills_its_rooms_before_anybody_takes() -> None:
    ours, theirs = pair()
    for number in range(len(AHEAD)):
        ours.slot(torch.int64, AHEAD)[0] = number
        ours.post([1], 1)
    taken: list[int] = []
    for _ in AHEAD:
        taken.append(int(theirs.take(0, torch.int64)[0]))
        theirs.give_back([0])
    assert taken == list(range(len(AHEAD)))


def test_collectives_and_sends_between_two_come_in_order() -> None:
    ours, theirs = pair()
    for turn in range(100):
        for number in range(3):
            ours.slot(torch.int64, AHEAD)[0] = 10 * turn + number
            ours.post([1], 1)
        ours.slot(torch.int64)[0] = 10 * turn + 3
        ours.post([1], 1)
        for number in range(4):
            assert theirs.take(0, torch.int64)[0] == 10 * turn + number
            theirs.give_back([0])


def test_two_are_asked_whether_they_chose_alike() -> None:
    """Each asks in a thread of its own, as workers ask in processes of their own."""
    ours, theirs = pair()
    with ThreadPoolExecutor() as pool:
        for mine, other in ((1, 1), (0, 2), (2, 2)):
            told = pool.submit(theirs.agree, [0], other)
            assert ours.agree([1], mine) is told.result() is (mine == other)
