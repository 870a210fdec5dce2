"""A snapshot of the user's accelerators, their jobs and workers, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from moaic.ir.layout import Mesh
from moaic.runtime.host.cores import cores, share_out
from moaic.runtime.host.flavors import flavors, named
from moaic.runtime.host.jobs import JobEntry, jobs, status_of
from moaic.runtime.host.selection import choice
from moaic.runtime.host.status import IDLE, Status
from moaic.runtime.protocol.commands import CODES, Adopt, Load
from moaic.tools.usage import cpu_shares, memory, temperature

_COMPILING: Final = frozenset({CODES[Load], CODES[Adopt]})
"""Commands in which workers compile."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker of a job: bytes of device memory, seconds, degrees Celsius; None for unknown values."""

    rank: int
    pid: int
    stage: int | None
    coordinates: str
    """Coordinates on the mesh of the plan, such as `dp=1, tp=0`; empty for a rank outside it, and without a plan."""
    memory: int
    cores: float
    """Cores in use: seconds of computing per second."""
    temperature: float | None
    steps: int | None
    step_seconds: float | None
    host: str = ""
    """The name of its host; empty for this one."""


@dataclass(frozen=True, slots=True)
class JobView:
    """A running program that uses an accelerator."""

    number: int
    pid: int
    command: str
    plan: str
    state: str
    """What it does: `starting`, `capturing`, `measuring`, `planning`, `compiling`, `training`, `running`, `idle` …

    `not used yet` while it has workers that were started in advance."""
    workers: tuple[WorkerView, ...]

    @property
    def memory(self) -> int:
        """Bytes of all workers."""
        return sum(worker.memory for worker in self.workers)

    @property
    def utilization(self) -> float:
        """Cores of this host in use, as a share of the cores assigned to its workers; at most 1."""
        here = [worker for worker in self.workers if not worker.host]
        dealt = min(cores(), sum(share_out(cores(), max(1, len(here)))))
        return min(1.0, sum(worker.cores for worker in here) / dealt)


@dataclass(frozen=True, slots=True)
class AcceleratorView:
    """One accelerator of the user and its jobs. The flavor of a running program goes before the chosen one."""

    number: int
    is_current: bool
    flavor: str
    total: int
    """Bytes of the flavor."""
    jobs: tuple[JobView, ...]

    @property
    def memory(self) -> int:
        return sum(job.memory for job in self.jobs)

    @property
    def utilization(self) -> float:
        return min(1.0, sum(job.utilization for job in self.jobs))


def overview(environment: Mapping[str, str]) -> list[AcceleratorView]:
    """Every accelerator of the user, also those known from running programs alone; samples the workers for a moment."""
    chosen, known = choice(environment), flavors(environment)
    entries = jobs(environment)
    shares = cpu_shares([pid for entry in entries for pid in entry.workers_here])
    found: list[AcceleratorView] = []
    for number in sorted({*chosen.sizes, *(entry.accelerator for entry in entries)}):
        here = [entry for entry in entries if entry.accelerator == number]
        flavor = here[0].flavor if here else named(chosen.sizes[number], known)
        name, total = (chosen.sizes[number], 0) if flavor is None else (flavor.name, flavor.memory)
        running = tuple(_job(entry, shares) for entry in here)
        found.append(AcceleratorView(number, number == chosen.current, name, total, running))
    return found


class _Load(NamedTuple):
    """What a worker uses of its host."""

    memory: int
    cores: float
    temperature: float | None


def _loads(entry: JobEntry, status: Status | None, shares: Mapping[int, float]) -> list[_Load]:
    """That of each worker: what the system says of this host's, what those of other hosts say of themselves."""
    nbytes, degrees = memory(entry.workers_here), temperature()
    return [
        _told(status, rank) if entry.host(rank) else _Load(nbytes[pid], shares[pid], degrees)
        for rank, pid in enumerate(entry.workers)
    ]


def _told(status: Status | None, rank: int) -> _Load:
    return _Load(0, 0.0, None) if status is None else _Load(status.resident_bytes(rank), status.cores(rank), None)


def _job(entry: JobEntry, shares: Mapping[int, float]) -> JobView:
    status, mesh = status_of(entry), Mesh(entry.mesh)
    workers: list[WorkerView] = []
    for rank, load in enumerate(_loads(entry, status, shares)):
        at = mesh.coordinates(rank) if entry.plan and rank < mesh.ranks else None
        steps = status.steps(rank) if status is not None else None
        workers.append(
            WorkerView(
                rank,
                entry.workers[rank],
                None if at is None else at.get("pp", 0),
                ", ".join(f"{axis}={at[axis]}" for axis, _ in mesh.axes) if at else "",
                (status.device_bytes(rank) if status is not None else 0) or load.memory,
                load.cores,
                load.temperature,
                steps,
                status.step_seconds(rank) if status is not None and steps else None,
                entry.host(rank),
            )
        )
    state = _state(entry, status)
    if status is not None:
        status.close()
    return JobView(entry.job, entry.pid, entry.command, entry.plan, state, tuple(workers))


def _state(entry: JobEntry, status: Status | None) -> str:
    """What a job does; programs that its workers compile beside it are counted."""
    if entry.phase or not (entry.workers and all(entry.workers)):
        return entry.phase or "starting"
    if status is None:
        return "ending"
    ranks = range(len(entry.workers))
    codes = {status.activity(rank).code for rank in ranks}
    if codes & _COMPILING:
        return "compiling"
    has_trained = any(status.steps(rank) for rank in ranks)
    state = "training" if has_trained else "idle" if codes == {IDLE.code} else "running"
    done, asked = min(map(status.compiled, ranks)), max(map(status.compiling, ranks))
    return f"{state}, {done} of {asked} programs compiled" if done < asked else state
