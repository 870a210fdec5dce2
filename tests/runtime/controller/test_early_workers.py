"""Workers that start before they are asked for: taken if they suit, ended if not, and left to the parent by a fork."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moaic.runtime.controller import early_workers
from moaic.runtime.controller.accelerator import Accelerator
from moaic.runtime.controller.buffer import whole
from moaic.runtime.controller.early_workers import EarlyWorkers
from moaic.runtime.host.flavors import asked_for
from tests.runtime.conftest import Script
from tests.runtime.test_failures import gone

TWO = asked_for("2", os.environ)


@pytest.fixture
def early() -> Iterator[EarlyWorkers]:
    workers = EarlyWorkers()
    workers.start(TWO)
    yield workers
    workers.discard()


def fork_servers() -> set[str]:
    """Those of this process; a compiler that another test used may have left processes, too."""
    tasks = Path(f"/proc/{os.getpid()}/task").iterdir()
    children = {child for task in tasks for child in (task / "children").read_text(encoding="ascii").split()}
    return {child for child in children if b"fork_server" in _command_line(child)}


def _command_line(process: str) -> bytes:
    """Empty for a moment, while a process that was just forked becomes another program."""
    for _ in range(100):
        if line := Path(f"/proc/{process}/cmdline").read_bytes():
            return line
        time.sleep(0.01)
    return b""


def test_they_are_the_workers_of_the_accelerator(early: EarlyWorkers) -> None:
    started = fork_servers()
    early.start(TWO)
    assert fork_servers() == started
    workers = early.take(TWO)
    assert workers is not None
    assert not early.is_started()
    accelerator = Accelerator(workers)
    buffer = accelerator.buffer("f32", (2,))
    accelerator.upload(buffer, torch.tensor([1.0, 2.0]))
    assert accelerator.download(whole(buffer)).tolist() == [1.0, 2.0]
    accelerator.close()


def test_those_of_another_flavor_are_ended() -> None:
    others, early = fork_servers(), EarlyWorkers()
    early.start(TWO)
    started = fork_servers() - others
    assert early.take(replace(TWO, workers=3)) is None
    assert started
    assert not started & fork_servers()


@pytest.mark.parametrize(("name", "suits"), [("OMP_WAIT_POLICY", False), ("MOAI_COMPILE", False), ("TOKENIZERS", True)])
def test_a_variable_that_workers_read_must_be_what_it_was(
    early: EarlyWorkers, monkeypatch: pytest.MonkeyPatch, name: str, suits: bool
) -> None:
    monkeypatch.setenv(name, "passive")
    workers = early.take(TWO)
    assert (workers is not None) == suits
    if workers is not None:
        workers.kill_all()


def test_a_forked_child_leaves_them_to_its_parent(early: EarlyWorkers) -> None:
    child = os.fork()
    if child == 0:
        os._exit(early.take(TWO) is not None)
    assert os.waitpid(child, 0)[1] == 0
    workers = early.take(TWO)
    assert workers is not None
    accelerator = Accelerator(workers)
    accelerator.synchronize()
    accelerator.close()


def test_a_spawned_process_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_workers, "parent_process", multiprocessing.current_process)
    workers = EarlyWorkers()
    workers.start(TWO)
    assert not workers.is_started()


SCRIPT = """
import pathlib, torch

def children():
    return pathlib.Path("/proc/thread-self/children").read_text().split()

torch.moai.option.enable_advanced_parallelization()
before = children()
print(len(before), flush=True)
"""


def test_the_one_line_starts_them_and_the_first_tensor_takes_them(script: Script) -> None:
    """They end with the mode, and a flavor that is set after it starts others."""
    rest = """
torch.moai.option.disable_advanced_parallelization()
print(len(children()))
torch.moai.option.enable_advanced_parallelization()
again = children()
torch.moai.set_flavor(3)
started = children()
print(len(again), len(started), started == again)
print(torch.ones(2).cuda().sum().item(), children() == started)
"""
    begin(script, rest)
    assert [script.line().split() for _ in range(3)] == [["0"], ["1", "1", "False"], ["2.0", "True"]]


def test_they_end_with_a_program_that_does_not_use_them(script: Script) -> None:
    begin(script, "print(*before)")
    server = script.line().strip()
    script.finish()
    assert not Path(f"/proc/{server}").exists()


@pytest.mark.parametrize("seconds", [0.0, 1.0, pytest.param(3.0, marks=pytest.mark.exact)])
def test_they_end_with_a_program_that_is_killed_while_they_start(script: Script, seconds: float) -> None:
    rest = "print(*before, flush=True)\nimport time\ntime.sleep(60)"
    script.start(SCRIPT + rest, MOAI_LOG="error", MOAI_COMPILE="1")
    server = int(script.line())
    time.sleep(seconds)
    assert script.process is not None
    script.process.kill()
    script.process.wait()
    assert gone([server])


def test_the_variable_starts_none(script: Script) -> None:
    without = SCRIPT.replace("torch.moai.option.enable", "#")
    assert script.start(without, MOAI_ENABLE_ADVANCED_PARALLELIZATION="1") == ["0"]


def begin(script: Script, rest: str) -> None:
    assert script.start(SCRIPT + rest, MOAI_LOG="error") == ["1"]
