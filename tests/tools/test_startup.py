"""The log of a program before its first step, and its end by mistakes and interrupts."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from moaic.runtime.host.version import VERSION
from tests.runtime.test_failures import gone

if TYPE_CHECKING:
    from tests.tools.conftest import Person

TRAIN = """
import torch
model = torch.nn.Linear(4, 4).to("moai")
step = torch.compile(model, backend="moai", options={"dp": 2})
step(torch.ones(4, 4).to("moai")).sum().backward()
with torch.no_grad():
    step(torch.ones(4, 4).to("moai"))
torch.moai.synchronize()
"""


def test_the_log_is_in_the_order_that_people_know(person: Person) -> None:
    _, said = person.start(TRAIN, MOAI_FLAVOR="2", CUDA_VISIBLE_DEVICES="0,1").communicate()
    lines = [line.partition("] ")[2] for line in said.splitlines()]
    assert all(line.startswith(("[info] ", "[warning] ")) for line in said.splitlines()), said
    assert lines[1].startswith("CUDA_VISIBLE_DEVICES=0,1 has no effect on the MoAI Accelerator: ")
    plain = [re.sub(r"process \d+", "process N", line) for line in lines]
    # The workers come while the program goes on.
    assert [sorted(plain[3:5]), *plain[:1], *plain[2:3], *plain[5:9]] == [
        [f"[{n}/2] Connecting to resources on the server (localhost, process N)..." for n in (1, 2)],
        "Requesting resources for MoAI Accelerator from the server...",
        "Initializing the worker daemon for MoAI Accelerator",
        "Establishing links to the resources...",
        "MoAI Accelerator is ready to use.",
        f"Moai Version: {VERSION}",
        "Moai Job ID: 1",
    ]
    planned = plain[9:]
    assert planned[0].startswith("The number of candidates is ")
    at = planned.index("Configuration for parallelism is selected.")
    assert planned[at + 1].startswith("num_stages : 1, num_micro_batches : ")
    assert planned[at + 2] == "train: true"
    (later,) = [line for line in planned if line.startswith("Another graph of this model (train: false) is planned: ")]
    assert planned.index(later) > at


def test_two_programs_on_one_accelerator_are_told_of_each_other(person: Person) -> None:
    program = "import sys, torch\ntorch.ones(2).to('moai').sum().item()\nprint('ready', flush=True)\nsys.stdin.read()"
    first = person.start(program, MOAI_FLAVOR="1", MOAI_LOG="warning")
    assert first.stdout is not None
    assert first.stdout.readline() == "ready\n"
    out, said = person.start(program, MOAI_FLAVOR="1").communicate()
    assert out == "ready\n"
    assert re.search(
        rf"\[info\] Accelerator 0 is also used by job 1 \(python\S* .*, pid {first.pid}\): both share", said
    )
    assert "both share" not in first.communicate()[1]


MISTAKE = """
import torch
model = torch.nn.Linear(4, 4).to("moai")
step = torch.compile(model, backend="moai", options={"dp": 3})
step(torch.ones(3, 4).to("moai"))
"""


@pytest.mark.parametrize(
    ("text", "environment", "message"),
    [
        (MISTAKE, {"MOAI_FLAVOR": "2"}, "train.py:4: error: dp=3 needs 3 workers, there are 2"),
        (MISTAKE.replace('"dp"', '"dq"'), {"MOAI_FLAVOR": "2"}, "train.py:4: error: there is no plan option `dq`"),
        (MISTAKE, {"MOAI_FLAVOR": "Huge"}, "error: there is no flavor `Huge`"),
        (MISTAKE, {"MOAI_LOG": "loud"}, "error: MOAI_LOG=loud is not a level"),
    ],
)
def test_a_mistake_ends_with_one_message(person: Person, text: str, environment: dict[str, str], message: str) -> None:
    process = person.start(text, **{"MOAI_LOG": "warning", **environment})
    _, said = process.communicate()
    assert process.returncode == 1
    assert message in said
    assert "Traceback" not in said
    assert len(said.splitlines()) <= 2
    assert not person.runtime_files


DEEP = """
import torch
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(40))).to("moai")
torch.compile(model, backend="moai")(torch.ones(64, 64).to("moai")).sum().backward()
"""


def children(pid: int) -> list[int]:
    """Every process that it or one of them started."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    mine = [int(word) for word in path.read_text(encoding="ascii").split()] if path.exists() else []
    return [*mine, *(each for child in mine for each in children(child))]


def test_an_interrupt_while_planning_leaves_nothing(person: Person) -> None:
    plans = set(person.cache.glob("plan-*"))
    process = person.start(DEEP, MOAI_FLAVOR="2")
    assert process.stderr is not None
    while "Parallel Graph Compile start" not in process.stderr.readline():
        assert process.poll() is None
    # The planner's processes start with the search.
    while len(started := children(process.pid)) < 4:
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode in (1, -signal.SIGINT)
    assert "[warning] Planning was interrupted." in said
    assert gone(started)
    assert not person.runtime_files
    assert set(person.cache.glob("plan-*")) == plans


def test_progress_is_shown_on_a_terminal_alone(person: Person) -> None:
    ours, theirs = pty.openpty()
    file = person.home / "deep.py"
    file.write_text(DEEP.replace("range(40)", "range(16)"), encoding="utf-8")
    environment = {**person.environment, "MOAI_FLAVOR": "2"}
    process = subprocess.Popen([sys.executable, str(file)], env=environment, stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # how the end of a terminal shows
        while select.select([ours], [], [], 60)[0] and (more := os.read(ours, 1 << 16)):
            shown += more
    os.close(ours)
    assert process.wait(20) == 0
    text = shown.decode()
    assert "\r\x1b[2KCapturing..." in text
    assert re.search(r"\r\x1b\[2KPlanning \[#* +\] \d+/\d+", text)
    assert "\r\x1b[2K[info] Configuration for parallelism is selected.\r\n" in text
    assert text.rpartition("Planning")[2].count("\r\x1b[2K") >= 2
