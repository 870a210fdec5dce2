"""The display of running programs, and that ended programs leave nothing behind."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from moaic.runtime.comm.shm_slots import Mailbox
from moaic.runtime.host.flavors import flavors
from moaic.runtime.host.jobs import begin, jobs, status_of
from moaic.runtime.protocol.commands import CODES, Load, Run
from moaic.runtime.protocol.shared_memory import create_memory
from moaic.text.tables import Column, bordered_table
from moaic.tools.overview import AcceleratorView, JobView, WorkerView, overview
from moaic.tools.smi import page
from moaic.tools.usage import is_worker
from moaic.tools.usage import memory as memory_of
from tests.runtime.test_failures import gone
from tests.tools.conftest import line

if TYPE_CHECKING:
    from pathlib import Path

    from tests.tools.conftest import Person

TRAIN = """
import sys, torch
model = torch.nn.Linear(8, 8).to("moai")
step = torch.compile(model, backend="moai", options={"dp": 2})
for _ in range(3):
    step(torch.ones(4, 8).to("moai")).sum().backward()
torch.moai.synchronize()
from moaic.runtime.controller import session
workers = session.accelerator().stats().workers
print(*(worker.pid for worker in workers), sum(worker.pss for worker in workers), flush=True)
sys.stdin.read()
"""

EXPECTING = """
import sys, torch
torch.moai.option.enable_advanced_parallelization()
print("enabled", flush=True)
sys.stdin.readline()
torch.ones(2).cuda().sum().item()
print("used", flush=True)
sys.stdin.readline()
"""

IDLE = """
import sys, torch
torch.ones(2).to("moai").sum().item()
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_table_is_aligned() -> None:
    made = bordered_table((Column("Device"), Column("Steps", ">")), [["* 0", "12"], ["  1", "1234567"]], "Version: 1")
    assert made.splitlines() == [
        "+----------------------+",
        "|          Version: 1  |",
        "+----------------------+",
        "|  Device  |   Steps   |",
        "+======================+",
        "|  * 0     |       12  |",
        "|    1     |  1234567  |",
        "+----------------------+",
    ]


def test_the_page_is_as_people_know_it() -> None:
    """Columns and borders of the tables that the tutorials print; the names and numbers are another product's."""
    worker = WorkerView(0, 11, 0, "", 1739561 << 20, 0.5, None, 3, 0.25)
    job = JobView(977890, 2219280, "python tutorial/train_baichuan2.py", "dp=2", "training", (worker,))
    shown = page([AcceleratorView(0, True, "4xLarge.2048GB", 2096640 << 20, (job,))])
    rule, width = "-", 103
    lines = shown.splitlines()
    assert [len(each) for each in lines[:7]] == [width] * 7
    assert lines[0] == f"+{rule * 101}+"
    assert lines[3] == (
        "|  Device  |        Name         |      Model       |  Memory Usage  |  Total Memory  |  Utilization  |"
    )
    assert lines[5].startswith(
        "|  * 0     |   MoAI Accelerator  |  4xLarge.2048GB  |  1739561 MiB   |  2096640 MiB   |  "
    )
    assert lines[7:9] == ["", "Processes:"]
    assert lines[12] == ("|       0  |  977890  |  2219280  |  python tutorial/train_baichuan2.py  |  1739561 MiB   |")


def test_what_nobody_uses_is_dashed(person: Person) -> None:
    done = person.ask("smi")
    assert re.search(r"\|  \* 0     \|   MoAI Accelerator  \|  \S+ +\|  - +\|  - +\|  - +\|", done.stdout)
    assert "Processes:" not in done.stdout


def test_a_training_is_shown_truly_and_gone_when_it_ends(person: Person) -> None:
    program = person.start(TRAIN, MOAI_FLAVOR="2")
    *pids, pss = map(int, line(program).split())
    (accelerator,) = json.loads(person.ask("smi", "--json").stdout)
    (job,) = accelerator["jobs"]
    assert (job["number"], job["pid"]) == (1, program.pid)
    assert job["command"].endswith("train.py")
    assert job["plan"].startswith("dp=2")
    assert [worker["pid"] for worker in job["workers"]] == pids
    assert [worker["coordinates"] for worker in job["workers"]] == ["dp=0", "dp=1"]
    assert [worker["steps"] for worker in job["workers"]] == [3, 3]
    assert job["state"] == "training"
    assert all(0 < worker["step_seconds"] < 60 for worker in job["workers"])
    assert sum(worker["memory"] for worker in job["workers"]) == pytest.approx(pss, rel=0.4)
    shown = person.ask("smi", "-p").stdout
    assert re.search(rf"\|       0  \|  1       \|  {program.pid} +\|  python\S* ", shown)
    assert re.search(rf"\|       1  \|  {pids[1]} +\|      0  \|  dp=1 ", shown)
    program.communicate()
    assert program.returncode == 0
    assert not person.runtime_files


def test_a_program_is_shown_before_it_uses_its_workers(person: Person) -> None:
    program = person.start(EXPECTING, MOAI_FLAVOR="2", MOAI_LOG="error")
    assert program.stdin is not None
    states: list[str] = []
    for word in ("enabled", "used"):
        assert line(program).strip() == word
        (accelerator,) = json.loads(person.ask("smi", "--json").stdout)
        (job,) = accelerator["jobs"]
        assert (job["number"], job["pid"], len(job["workers"])) == (1, program.pid, 0 if word == "enabled" else 2)
        states.append(job["state"])
        program.stdin.write("\n")
        program.stdin.flush()
    assert states[0] == "not used yet"
    assert states[1] in ("running", "idle")
    program.communicate()
    assert program.returncode == 0
    assert not person.runtime_files


@pytest.mark.parametrize(
    "ending",
    ["", "torch.moai.option.disable_advanced_parallelization()\nprint('off', flush=True)\nsys.stdin.readline()\n"],
    ids=["the program ends", "the mode ends"],
)
def test_workers_that_nobody_used_leave_no_entry(person: Person, ending: str) -> None:
    code = EXPECTING.partition("torch.ones")[0] + ending
    program = person.start(code, MOAI_FLAVOR="2", MOAI_LOG="error")
    line(program)
    assert len(person.runtime_files) == 2
    assert program.stdin is not None
    program.stdin.write("\n")
    program.stdin.flush()
    if ending:
        assert line(program).strip() == "off"
    else:
        program.communicate()
    assert not person.runtime_files
    program.communicate()


def test_the_entry_of_unused_workers_is_their_programs_alone(person: Person) -> None:
    child = "import os\nif os.fork() == 0: os.closerange(0, 3); os.execvp('sleep', ['sleep', '30'])\n"
    program = person.start(EXPECTING.replace("print(", child + "print(", 1), MOAI_FLAVOR="2", MOAI_LOG="error")
    line(program)
    program.kill()
    program.wait()
    assert not json.loads(person.ask("smi", "--json").stdout)[0]["jobs"]


def test_a_killed_program_disappears_although_its_child_lives(person: Person) -> None:
    child = "import os, time\nif os.fork() == 0: os.closerange(0, 3); time.sleep(30); os._exit(0)\n"
    program = person.start(TRAIN.replace("sys.stdin.read()", child + "sys.stdin.read()"), MOAI_FLAVOR="2")
    line(program)
    assert len(json.loads(person.ask("smi", "--json").stdout)[0]["jobs"]) == 1
    program.kill()
    program.wait()
    assert person.runtime_files
    assert not json.loads(person.ask("smi", "--json").stdout)[0]["jobs"]
    assert not person.runtime_files


def test_people_with_two_homes_have_no_job_twice(person: Person, tmp_path: Path) -> None:
    one, other = ({**person.environment, "HOME": str(tmp_path / name)} for name in ("one", "other"))
    flavor = flavors(one)[0]
    first, second = begin(one, 0, flavor), begin(other, 0, flavor)
    assert [entry.job for entry in jobs(one)] == [first.number, second.number] == [1, 2]
    first.close()
    second.close()
    assert not person.runtime_files


def test_memory_of_a_worker_on_a_gpu_is_the_gpus(person: Person) -> None:
    memory = create_memory(2)
    Mailbox(memory, 0, 2, []).beat(3 << 30)
    job = begin(person.environment, 0, flavors(person.environment)[0])
    job.started([os.getpid(), os.getpid()], memory)
    (accelerator,) = overview(person.environment)
    here, there = accelerator.jobs[0].workers
    assert here.memory == 3 << 30 != there.memory > 0
    job.close()
    os.close(memory)


def test_workers_of_other_hosts_are_shown_by_what_they_tell(person: Person) -> None:
    """Their process ids may be those of programs here, which are not looked at."""
    memory = create_memory(3)
    Mailbox(memory, 1, 3, []).beat(0, 1500, 5 << 30)
    job = begin(person.environment, 0, flavors(person.environment)[0])
    job.started([os.getpid()] * 3, memory, ["", "node2", "node3"])
    (entry,) = jobs(person.environment)
    assert entry.hosts == ("", "node2", "node3")
    assert entry.workers_here == (os.getpid(),)
    (accelerator,) = overview(person.environment)
    here, there, silent = accelerator.jobs[0].workers
    assert [each.host for each in (here, there, silent)] == ["", "node2", "node3"]
    assert (there.memory, there.cores, there.temperature) == (5 << 30, 1.5, None)
    assert (silent.memory, silent.cores) == (0, 0.0)
    assert 0 < here.memory != 5 << 30
    shown = page([accelerator], with_workers=True)
    assert re.search(r"\|  Worker  \|    Host     \|  +PID  +\|", shown)
    assert re.search(rf"\|       0  \|  localhost  \|  {os.getpid()} +\|", shown)
    assert re.search(rf"\|       1  \|  node2      \|  {os.getpid()} .*\|  5120 MiB +\|  150 % +\|  - ", shown)
    assert re.search(rf"\|       2  \|  node3      \|  {os.getpid()} .*\|  - +\|  0 % +\|  - ", shown)
    job.started([os.getpid()] * 3, memory, ["", "", ""])
    assert "Host" not in page(overview(person.environment), with_workers=True)
    job.close()
    os.close(memory)


BUSY = """
import sys, torch
x = torch.ones(512, 512).to("moai")
print("ready", flush=True)
while True:
    (x @ x).sum().item()
"""


def test_workers_tell_what_they_use(person: Person) -> None:
    program = person.start(BUSY, MOAI_FLAVOR="1", MOAI_LOG="warning")
    assert line(program) == "ready\n"
    until = time.monotonic() + 20
    while not ((entry := jobs(person.environment)[0]).workers and (status := status_of(entry)) is not None):
        assert time.monotonic() < until
    while status.cores(0) < 0.05:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert status.cores(0) < 100
    assert status.resident_bytes(0) == pytest.approx(memory_of(entry.workers)[entry.workers[0]], rel=0.2)
    status.close()


def test_a_job_says_what_it_does(person: Person) -> None:
    memory = create_memory(2)
    boxes = [Mailbox(memory, rank, 2, []) for rank in range(2)]
    job = begin(person.environment, 0, flavors(person.environment)[0])

    def state() -> str:
        (accelerator,) = overview(person.environment)
        return accelerator.jobs[0].state

    assert state() == "starting"
    job.started([os.getpid(), 0], memory)
    assert state() == "starting"
    job.started([os.getpid()] * 2, memory)
    boxes[0].begin(-1, -1, -1)
    boxes[1].begin(-1, -1, -1)
    assert state() == "idle"
    job.entered("planning")
    assert state() == "planning"
    job.entered("")
    boxes[1].begin(1, CODES[Load], 0)
    assert state() == "compiling"
    boxes[1].begin(1, CODES[Run], 0)
    for box in boxes:
        box.begin_compiling()
        box.begin_compiling()
    assert state() == "running, 0 of 2 programs compiled"
    boxes[0].finish_compiling()
    assert state() == "running, 0 of 2 programs compiled"
    boxes[1].finish_compiling()
    boxes[1].finish_step(0.1)
    assert state() == "training, 1 of 2 programs compiled"
    for box in boxes:
        box.finish_compiling()
    assert state() == "training"
    job.planned("dp=2", (("dp", 2),))
    assert page(overview(person.environment)).endswith("\nJob 1: training (dp=2)")
    job.close()
    os.close(memory)


def test_a_job_of_another_version_is_in_nobodys_way(person: Person) -> None:
    job = begin(person.environment, 0, flavors(person.environment)[0])
    (path,) = (person.home / "moai").glob("*.json")
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), "colour": 3}), encoding="utf-8")
    assert jobs(person.environment) == []
    assert path.exists()
    job.close()
    assert not person.runtime_files


def test_accelerators_are_added_switched_and_removed(person: Person) -> None:
    assert "Accelerator 1 is added." in person.ask("smi", "device", "--add", "Small").stdout
    assert "Programs take accelerator 1" in person.ask("smi", "device", "--switch", "1").stdout
    shown = person.ask("smi").stdout
    assert re.search(r"\|    0     \|.*\n\|  \* 1     \|   MoAI Accelerator  \|  Small\.", shown)
    used = person.ask("smi", "device", "--rm", "7")
    assert (used.returncode, used.stdout) == (2, "")
    assert used.stderr.startswith("error: there is no accelerator 7: you have 0, 1\n")
    assert "Accelerator 1 is removed." in person.ask("smi", "device", "--rm", "1").stdout
    assert "* 0" in person.ask("smi", "device", "--list").stdout


def test_no_such_accelerator_is_one_message(person: Person) -> None:
    program = person.start('import torch\ntorch.ones(2).to("moai")', MOAI_ACCELERATOR="3", MOAI_LOG="warning")
    _, said = program.communicate()
    assert program.returncode == 1
    assert "error: there is no accelerator 3: you have 0" in said
    assert not person.runtime_files


def test_reset_ends_what_runs(person: Person) -> None:
    assert person.ask("smi", "-r").stdout == "No program uses accelerator 0.\n"
    program = person.start(IDLE, MOAI_FLAVOR="1", MOAI_LOG="warning")
    assert line(program) == "ready\n"
    assert "Nothing was done." in person.ask("smi", "--reset", typed="n\n").stdout
    assert program.poll() is None
    assert "is reset" in person.ask("smi", "--reset", "--yes").stdout
    assert program.wait(10) != 0
    assert not person.runtime_files


STUBBORN = """
import os, signal, sys, torch
from moaic.runtime.controller.session import accelerator
signal.signal(signal.SIGTERM, signal.SIG_IGN)
torch.ones(2).to("moai").sum().item()
pids = [worker.pid for worker in accelerator().stats().workers]
os.kill(pids[1], signal.SIGSTOP)
print(*pids, flush=True)
sys.stdin.read()
"""


def test_reset_kills_what_does_not_end(person: Person) -> None:
    """A program that ignores being asked, and a worker that cannot notice that its program has ended."""
    program = person.start(STUBBORN, MOAI_FLAVOR="2", MOAI_LOG="warning")
    pids = [int(word) for word in line(program).split()]
    assert all(map(is_worker, pids))
    assert "is reset" in person.ask("smi", "--reset", "--yes").stdout
    assert program.wait(10) == -signal.SIGKILL
    assert gone(pids)
    assert not person.runtime_files


ELSEWHERE = """
import os, sys
from moaic.runtime.host.flavors import flavors
from moaic.runtime.host.jobs import begin
job = begin(os.environ, 0, flavors(os.environ)[0])
job.started([int(os.environ["PID"])], -1, ["node2"])
print("ready", flush=True)
sys.stdin.read()
"""


def test_reset_kills_no_process_that_has_the_number_of_a_worker_elsewhere(person: Person) -> None:
    command = [sys.executable, "-c", "input()", "moaic.runtime.worker.fork_server"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as other:
        program = person.start(ELSEWHERE, PID=str(other.pid))
        assert line(program) == "ready\n"
        assert is_worker(other.pid)
        assert "is reset" in person.ask("smi", "--reset", "--yes").stdout
        assert program.wait(10) != 0
        assert other.poll() is None
        other.communicate(b"\n")


def test_watching_is_ended_by_an_interrupt(person: Person) -> None:
    ours, theirs = pty.openpty()
    command = person.command("moaic.tools.smi", "--watch", "0.1")
    process = subprocess.Popen(command, env={**person.environment, "TERM": "xterm"}, stdout=theirs, text=True)
    person.programs.append(process)
    os.close(theirs)
    shown = b""
    while b"MoAI Accelerator" not in shown:
        assert select.select([ours], [], [], 20)[0]
        shown += os.read(ours, 1 << 16)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(20) == 130
    os.close(ours)
