"""Threads of this process that wait for work: they leave the cores to the workers.

After every parallel op on host tensors, OpenMP's threads spin for milliseconds in case another follows. Of a step that
copies its batch to the accelerator, that is as much time of a core as a small step takes. Where a process has more
OpenMP threads than cores, they sleep at once instead, so teams of threads that never work are added to its own.
"""

from __future__ import annotations

import os
import threading
from typing import Final

import torch

ENOUGH: Final = 1 << 16
"""Elements of an op that is surely parallel: twice those up to which PyTorch's ops run on one thread."""


def let_sleep() -> None:
    """Let idle threads of OpenMP sleep; where the program has fewer than half of the cores, the others are free."""
    # OpenMP counts the cores of the affinity: it knows no quota.
    own, available = torch.get_num_threads(), len(os.sched_getaffinity(0))
    if own > 1 and available <= 2 * own:
        teams = [threading.Event() for _ in range((available - own) // (own - 1) + 1)]
        for made in teams:
            threading.Thread(target=_with_team, args=(made,), name="idle", daemon=True).start()
        # A program that ends while one of its threads is in an op of PyTorch is aborted.
        for made in teams:
            made.wait()


def _with_team(made: threading.Event) -> None:
    torch.empty(ENOUGH, dtype=torch.uint8, device="cpu").zero_()
    made.set()
    threading.Event().wait()
