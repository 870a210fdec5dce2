"""`moai-smi`: shows the user's accelerators with their jobs, memory and utilization, and manages them."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from moaic.ir.errors import Diagnostic
from moaic.runtime.host.flavors import flavors, named
from moaic.runtime.host.jobs import JobEntry, jobs
from moaic.runtime.host.selection import choice, current, keep
from moaic.runtime.host.version import VERSION
from moaic.text.tables import Column, bordered_table, left, right
from moaic.text.units import mib
from moaic.tools.command import CommandParser, answered
from moaic.tools.overview import AcceleratorView, JobView, WorkerView, overview
from moaic.tools.switch_model import numbered, picked
from moaic.tools.usage import is_worker

NAME = "MoAI Accelerator"

LONGEST = 60
"""Most characters of a command line in a table."""

END_SECONDS = 5.0
"""Seconds from SIGTERM to SIGKILL for a program."""

WORKER_END_SECONDS = 2.0
"""Seconds in which workers end after their program, unless they are stopped; then they are killed."""

DEVICES = (
    *left("Device"),
    Column("Name", ">", least=17),
    Column("Model", least=14),
    *left("Memory Usage", "Total Memory", "Utilization"),
)
PROCESSES = (*right("Device"), *left("Job ID", "PID", "Process", "Memory Usage"))
WORKERS = (
    *right("Device"),
    *left("Job ID"),
    *right("Worker"),
    *left("PID"),
    *right("Stage"),
    *left("Coordinates", "Memory Usage", "Utilization", "Temperature"),
    *right("Steps"),
    *left("Last Step"),
)
HOST_AT = 3
"""Where the table of workers has a column for their hosts, if a job has workers on others."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code."""
    chosen = parser().parse_args(arguments)
    return answered(lambda: chosen.command(chosen, os.environ))


def parser() -> argparse.ArgumentParser:
    made = CommandParser("moai-smi", description="Show your MoAI Accelerators and what runs on them.")
    made.add_version()
    made.add_argument("-p", "--processes", action="store_true", help="also print a line for each worker")
    made.add_argument("-r", "--reset", action="store_true", help="end the programs that use the current accelerator")
    made.add_argument("-y", "--yes", action="store_true", help="with --reset: do not ask")
    made.add_argument("--json", action="store_true", help="print everything as JSON, in bytes and seconds")
    made.add_argument(
        "--watch", type=float, metavar="SECONDS", help="refresh a live view as often as this, until Ctrl-C"
    )
    made.set_defaults(command=_show)
    commands = made.add_subparsers(metavar="COMMAND")
    device = commands.add_parser(
        "device", help="list, add, remove or switch accelerators", description="Your MoAI Accelerators."
    )
    action = device.add_mutually_exclusive_group(required=True)
    action.add_argument("--list", action="store_true", help="list the accelerators")
    action.add_argument("--add", metavar="FLAVOR", nargs="?", const="", help="add one of a flavor, by number or name")
    action.add_argument("--rm", type=int, metavar="N", help="remove accelerator N")
    action.add_argument("--switch", type=int, metavar="N", help="have programs use accelerator N from now on")
    device.set_defaults(command=_device)
    return made


def _show(chosen: argparse.Namespace, environment: Mapping[str, str]) -> int:
    current(environment)  # raises for a wrong MOAI_ACCELERATOR, which the tables would not show
    if chosen.reset:
        return _reset(environment, is_sure=chosen.yes)
    if chosen.watch is not None:
        _watch(chosen.watch, environment, with_workers=chosen.processes)
    elif chosen.json:
        print(json.dumps([asdict(accelerator) for accelerator in overview(environment)], indent=1))
    else:
        print(page(overview(environment), with_workers=chosen.processes))
    return 0


def page(accelerators: Sequence[AcceleratorView], *, with_workers: bool = False) -> str:
    """The tables of accelerators, of processes if there are any, and on demand of workers."""
    caption = f"Current Version: {VERSION}  Latest Version: -"
    parts = [bordered_table(DEVICES, [_device_row(each) for each in accelerators], caption)]
    running = [(each.number, job) for each in accelerators for job in each.jobs]
    if running:
        parts += ["", "Processes:", bordered_table(PROCESSES, [_process_row(number, job) for number, job in running])]
    if running and with_workers:
        parts += ["", "Workers:", _worker_table(running)]
    parts += [f"Job {job.number}: {job.state}{f' ({job.plan})' if job.plan else ''}" for _, job in running]
    return "\n".join(parts)


def _device_row(each: AcceleratorView) -> list[str]:
    head = [_starred(each.number, is_current=each.is_current), NAME, each.flavor]
    if not each.jobs:
        return [*head, "-", "-", "-"]
    return [*head, _size(each.memory), _size(each.total), f"{100 * each.utilization:.0f} %"]


def _process_row(number: int, job: JobView) -> list[str]:
    command = job.command if len(job.command) <= LONGEST else f"{job.command[: LONGEST - 3]}..."
    return [str(number), str(job.number), str(job.pid), command, _size(job.memory)]


def _worker_table(running: Sequence[tuple[int, JobView]]) -> str:
    workers = [(number, job, worker) for number, job in running for worker in job.workers]
    columns, rows = list(WORKERS), [_worker_row(*each) for each in workers]
    if any(worker.host for _, _, worker in workers):
        columns[HOST_AT:HOST_AT] = left("Host")
        for row, (_, _, worker) in zip(rows, workers, strict=True):
            row.insert(HOST_AT, worker.host or "localhost")
    return bordered_table(columns, rows)


def _worker_row(number: int, job: JobView, worker: WorkerView) -> list[str]:
    return [
        str(number),
        str(job.number),
        str(worker.rank),
        str(worker.pid or "-"),
        "-" if worker.stage is None else str(worker.stage),
        worker.coordinates or "-",
        _size(worker.memory),
        f"{100 * worker.cores:.0f} %",
        "-" if worker.temperature is None else f"{worker.temperature:.0f} C",
        "-" if worker.steps is None else str(worker.steps),
        "-" if worker.step_seconds is None else f"{1000 * worker.step_seconds:.1f} ms",
    ]


def _size(nbytes: int) -> str:
    return mib(nbytes) if nbytes else "-"


def _watch(seconds: float, environment: Mapping[str, str], *, with_workers: bool) -> None:
    """Redraws the page on the whole screen every `seconds`, until the user interrupts."""
    try:
        from rich.live import Live
        from rich.text import Text
    except ImportError:
        raise Diagnostic("--watch needs the package rich", hint="pip install rich") from None
    if not 0 < seconds < math.inf:
        raise Diagnostic(f"--watch takes a number of seconds above 0, not {seconds:g}")

    def view() -> Text:
        return Text(page(overview(environment), with_workers=with_workers), no_wrap=True)

    with Live(view(), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(seconds)
            live.update(view(), refresh=True)


def _reset(environment: Mapping[str, str], *, is_sure: bool) -> int:
    """Ends the programs of the current accelerator. Reading the jobs removes the files of programs that are gone."""
    number = current(environment)
    running = [entry for entry in jobs(environment) if entry.accelerator == number]
    if not running:
        print(f"No program uses accelerator {number}.")
        return 0
    for entry in running:
        print(f"Job {entry.job} will be ended: {entry.command} (pid {entry.pid}).")
    if not is_sure and not _agrees():
        print("Nothing was done.")
        return 0
    for entry in running:
        _end(entry, environment)
    print(f"Accelerator {number} is reset.")
    return 0


def _agrees() -> bool:
    try:
        return input("Continue? (y/N): ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _end(entry: JobEntry, environment: Mapping[str, str]) -> None:
    """Asks the program to end and kills it if it does not; then kills workers of this host that outlive it.

    A job is listed only while its program holds its lock, so the process id cannot be another program's.
    """
    until = time.monotonic() + END_SECONDS
    _send(entry.pid, signal.SIGTERM)
    while any(other.job == entry.job for other in jobs(environment)):
        if time.monotonic() > until:
            _send(entry.pid, signal.SIGKILL)
        time.sleep(0.1)
    until = time.monotonic() + WORKER_END_SECONDS
    while left := [pid for pid in entry.workers_here if is_worker(pid)]:
        for pid in left if time.monotonic() > until else ():
            _send(-pid, signal.SIGKILL)
        time.sleep(0.1)


def _send(pid: int, number: signal.Signals) -> None:
    """Sends a signal to a process, or for a negative `pid` to its process group; one that has ended is ignored."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _device(chosen: argparse.Namespace, environment: Mapping[str, str]) -> int:
    have = choice(environment)
    if chosen.add is not None:
        added, number = have.added(picked(chosen.add or _flavor_asked(environment), flavors(environment)))
        keep(environment, added)
        print(f"Accelerator {number} is added.")
    elif chosen.rm is not None:
        _check_unused(chosen.rm, environment)
        keep(environment, have.removed(chosen.rm))
        print(f"Accelerator {chosen.rm} is removed.")
    elif chosen.switch is not None:
        keep(environment, have.switched(chosen.switch))
        print(f"Programs take accelerator {chosen.switch} from now on.")
        if "MOAI_ACCELERATOR" in environment:
            word = environment["MOAI_ACCELERATOR"]
            print(f"MOAI_ACCELERATOR={word} is set and wins over this choice.", file=sys.stderr)
    print(_devices(environment))
    return 0


def _flavor_asked(environment: Mapping[str, str]) -> str:
    """Asks the user for the flavor of a new accelerator."""
    known = flavors(environment)
    print("\n".join(numbered(number, flavor) for number, flavor in enumerate(known, 1)))
    try:
        return input(f"Selection (1-{len(known)}): ").strip()
    except EOFError:
        raise Diagnostic("no flavor was selected", hint="give it as `moai-smi device --add FLAVOR`") from None


def _check_unused(number: int, environment: Mapping[str, str]) -> None:
    for entry in jobs(environment):
        if entry.accelerator == number:
            raise Diagnostic(
                f"accelerator {number} is used by job {entry.job}: {entry.command} (pid {entry.pid})",
                hint="wait for it, or end it by `moai-smi --reset`",
            )


def _devices(environment: Mapping[str, str]) -> str:
    have, known = choice(environment), flavors(environment)
    rows: list[list[str]] = []
    for number, size in sorted(have.sizes.items()):
        flavor = named(size, known)
        rows.append([_starred(number, is_current=number == have.current), NAME, flavor.name if flavor else size])
    return bordered_table(DEVICES[:3], rows)


def _starred(number: int, *, is_current: bool) -> str:
    return f"{'*' if is_current else ' '} {number}"
