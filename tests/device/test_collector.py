"""Collections are seldom while modules are imported and models captured, and afterwards as the user has them."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from moaic.device.collector import SELDOM, collecting_seldom

PROGRAM = """
import gc
import torch
usual = gc.get_threshold()
runs = []
gc.callbacks.append(lambda phase, info: runs.append(info["generation"]) if phase == "stop" else None)
model = torch.compile(torch.nn.Linear(8, 8).to("moai"), backend="moai")
model(torch.ones(4, 8, device="moai")).sum().backward()
print(len(runs) < 250, gc.get_threshold() == usual, len(runs))
"""


def test_a_first_step_is_hardly_interrupted() -> None:
    """It would be by 580 collections."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("True True "), done.stdout


@pytest.fixture(params=[(700, 10, 10), (0, 10, 10), (SELDOM * 2, 5, 5)], ids=str)
def threshold(request: pytest.FixtureRequest) -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    gc.set_threshold(*request.param)
    yield request.param
    gc.set_threshold(*before)


def test_the_users_threshold_comes_back(threshold: tuple[int, int, int]) -> None:
    within = (SELDOM, *threshold[1:]) if threshold[0] == 700 else threshold
    with collecting_seldom():
        assert gc.get_threshold() == within
        with contextlib.suppress(ZeroDivisionError), collecting_seldom():
            raise ZeroDivisionError
        assert gc.get_threshold() == within
    assert gc.get_threshold() == threshold
