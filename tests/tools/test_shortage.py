"""Out-of-memory messages, and that their advice helps."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from moaic.compile.oom_advice import Capacity, OversizedStep, advice
from moaic.ir.graph import Module
from moaic.passes.config import Request
from moaic.passes.perf.machine import Machine
from moaic.planner.search import NoPlanFits, search
from moaic.planner.worker import InProcessPool
from moaic.runtime.host.flavors import Flavor, this_host
from moaic.text.units import MIB
from tests.passes.steps import dense, machine

if TYPE_CHECKING:
    from tests.tools.conftest import Person


def hints(step: Module, where: Machine, request: Request, rooms: list[Capacity]) -> list[str]:
    """The hints for a step of which no plan fits."""
    with pytest.raises(NoPlanFits) as raised:
        search(step, where, request, pool=InProcessPool())
    sized = [(each.config, each.memory) for each in raised.value.candidates if each.memory is not None]
    return advice(OversizedStep(step, request, sized, tried=True), where, rooms, InProcessPool()).split("\nhint: ")


def room(workers: int, memory: int) -> Capacity:
    return Capacity(Flavor("Large", workers, workers * memory), memory)


def test_a_flavor_that_is_advised_fits() -> None:
    """Weights of 2 MiB with gradients and optimizer state: two workers' 6 MiB do not hold them, four workers' do."""
    step, where = dense(8, 512, 512), replace(machine(), workers=2, memory=6 * MIB)
    request = Request(tp=1, pp=1, cp=1, micro_batches=1)
    *_, flavor, batch = hints(step, where, request, [room(2, 6 * MIB), room(4, 6 * MIB), room(8, 6 * MIB)])
    assert "`moai-switch-model -M Large.0.0GB`: on its 4 workers" in flavor
    assert search(step, replace(where, workers=4), request, pool=InProcessPool()).plan.config.ranks == 4
    assert batch.startswith("no smaller batch is expected to help: the model, ")


def test_a_batch_that_is_advised_fits() -> None:
    where, request = replace(machine(), workers=1, memory=2 * MIB), Request(micro_batches=1)
    options, flavor, batch = hints(dense(1 << 16), where, request, [])
    assert flavor == "no flavor of this machine is large enough"
    found = re.fullmatch(r"give batches of at most (\d+) instead of 65536", batch)
    assert found is not None, batch
    assert search(dense(int(found[1])), where, request, pool=InProcessPool()).plan
    with pytest.raises(NoPlanFits):
        search(dense(2 * int(found[1])), where, request, pool=InProcessPool())
    assert options.startswith('take a plan that needs less, MOAI_PLAN="')


TRAIN = """
import resource, sys, torch
from pathlib import Path
from moaic.runtime.controller import session

FIXED = {"dp": 2, "micro_batches": 1, "recompute": "saved", "distribute_param": "none", "loss_chunks": 1}
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).to("moai")
step = torch.compile(model, backend="moai", dynamic=False, options=FIXED)
step(torch.ones(8, 64).to("moai")).sum().backward()
torch.moai.synchronize()
for worker in session.accelerator().stats().workers:
    status = Path(f"/proc/{worker.pid}/status").read_text()
    held = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData"))
    resource.prlimit(worker.pid, resource.RLIMIT_DATA, (held + (300 << 20), -1))
for rows in (int(word) for word in sys.stdin):
    try:
        step(torch.ones(rows, 64, device="moai")).sum().backward()
        torch.moai.synchronize()
        print("done", flush=True)
    except RuntimeError as error:
        print(type(error).__name__, *str(error).splitlines(), sep="\\n", flush=True)
        print("end", flush=True)
"""


def tried(person: Person, rows: int, **more: str) -> list[str]:
    """What comes of a step of so many rows."""
    out, _ = person.start(TRAIN, MOAI_FLAVOR="2", MOAI_LOG="warning", **more).communicate(f"{rows}\n")
    return out.splitlines()


def advised(hints: list[str]) -> int:
    (rows,) = [int(found[1]) for hint in hints if (found := re.search(r"batches of at most (\d+) instead of", hint))]
    return rows


CLUSTER = """
[[host]]
name = "localhost"
workers = 2
memory = "{}MB"

[[host]]
name = "elsewhere"
workers = 14
memory = "4TB"
"""


def test_a_worker_that_runs_out_of_memory_is_named_with_advice(person: Person) -> None:
    """A flavor of other hosts would do, and is none, since nothing can be started there."""
    person.cluster_file.write_text(CLUSTER.format(this_host({}).memory // MIB), encoding="utf-8")
    kind, first, plan, *hints, _ = tried(person, 1 << 19)
    assert kind == "OutOfMemory"
    what = r"worker \d of 2 ran out of memory in .*, asked for at \S*train.py:\d+: "
    assert re.fullmatch(what + r"it holds \d+ MiB, asked for \d+ MiB more, and \d+ MiB were free", first), first
    assert re.match(r"the plan dp=2 was predicted to need \d+ MiB per worker, and this one could have \d+ MiB", plan)
    assert 0 < advised(hints) < 1 << 19
    assert any("no flavor of this machine is large enough" in hint for hint in hints), hints
    assert not person.runtime_files


@pytest.mark.exact
def test_the_batch_that_is_advised_trains_under_the_limit(person: Person) -> None:
    """Compiled, as people train: memory is predicted for compiled functions."""
    rows = advised(tried(person, 1 << 19, MOAI_COMPILE="wait"))
    assert tried(person, rows, MOAI_COMPILE="wait") == ["done"]


KILLED = """
import os, signal, sys, torch
from pathlib import Path
from moaic.runtime.host import memory
from moaic.runtime.controller.session import accelerator

# The kernel counts there; what it counts cannot be had without having it kill.
memory.GROUP_EVENTS = Path(sys.argv[0]).with_name("memory.events")
memory.GROUP_EVENTS.write_text("oom 0\\noom_kill 0\\n")
model = torch.nn.Linear(8, 8).to("moai")
step = torch.compile(model, backend="moai", options={"dp": 2})
step(torch.ones(4, 8).to("moai")).sum().backward()
memory.GROUP_EVENTS.write_text("oom 1\\noom_kill 1\\n")
os.kill(accelerator().stats().workers[1].pid, signal.SIGKILL)
step(torch.ones(4, 8).to("moai")).sum().backward()
torch.moai.synchronize()
"""


def test_a_worker_that_the_kernel_kills_for_want_of_memory_is_named(person: Person) -> None:
    program = person.start(KILLED, MOAI_FLAVOR="2", MOAI_LOG="warning")
    _, said = program.communicate()
    assert program.returncode == 1
    *_, last = said.splitlines()
    assert "WorkerError: worker 1 of 2 failed in " in last
    assert "train.py:" in last
    assert last.endswith(": the process was killed by SIGKILL while the kernel was out of memory and killed processes")
    assert not person.runtime_files
