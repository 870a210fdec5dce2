"""A part of `bench/gpu.py`: moaic's kernels beside Inductor's version of their references and Liger-Kernel's.

Forward and backward together, in rounds, in each of which every peer runs in turn; figures are medians of rounds. The
results of all peers are compared before timing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

import torch
from gpu_findings import Check, Figure, LeftOut, Task, parser, task_of
from parked_kernels.catalogue import ALL_KERNELS, table_of, tile_of
from test_kernels import PEERS, agree, peak, runs_of, seconds

from moaic.runtime.emulation.triton_interpreter import complete
from moaic.runtime.kernels.gains import KernelShape
from moaic.runtime.kernels.triton_launch import target_of

ROUNDS = 3

HERE: Mapping[str, KernelShape] = {"norm": (8, 64), "gated": (8, 64)}
"""Kernels that Triton's interpreter runs at tiny shapes; the others would show no more of this script."""

TARGET_HERE = "sm_90"

OURS, INDUCTOR = "ours", "inductor"


def shapes(*, here: bool) -> Iterator[tuple[str, KernelShape]]:
    """The first shape of every kernel, then the others: what is left out for want of time is the larger."""
    if here:
        yield from HERE.items()
        return
    kernels = ALL_KERNELS.values()
    for place in range(max(len(kernel.shapes) for kernel in kernels)):
        yield from ((kernel.name, kernel.shapes[place]) for kernel in kernels if place < len(kernel.shapes))


def timed_here(run: Callable[[], Any]) -> float:
    """Seconds of one run: there is no GPU whose clock could be asked."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


Runs = Mapping[str, Callable[[], Any]]
"""By peer: forward and backward of one kernel at one shape."""


def prepared(task: Task, name: str, shape: KernelShape) -> Runs | None:
    """Compiled, and compared with one another; None without a tile. Raises what the kernel or its peers raise."""
    target = TARGET_HERE if task.here else target_of(torch.device(task.device))
    tile = tile_of(name, target, shape)
    if tile is None:
        task.say(LeftOut(subject_of(name, shape), f"no tile for this GPU: {table_of(name)} lists its tiles"))
        return None
    # Of sizes that were seen before, Dynamo would make symbols.
    torch.compiler.reset()
    peers = PEERS[name](shape, torch.device(task.device), tile)
    agree(peers)
    # Liger-Kernel's are not written for the interpreter.
    runs = {peer: run for peer, run in runs_of(peers).items() if not (task.here and peer == "liger")}
    for run in runs.values():
        run()
    task.say(Check(subject_of(name, shape), passed=True))
    return runs


def take_times(task: Task, subject: str, runs: Runs) -> None:
    clock = timed_here if task.here else seconds
    times = {peer: list[float]() for peer in runs}
    for _ in range(ROUNDS):
        for peer, run in runs.items():
            times[peer].append(clock(run))
    task.say(*figures(subject, times))
    if not task.here:
        task.say(*(Figure(subject, peer, "peak memory", peak(run) / 1e6, "MB") for peer, run in runs.items()))


def subject_of(name: str, shape: KernelShape) -> str:
    return f"{name} {' x '.join(map(str, shape))}"


def figures(subject: str, times: Mapping[str, list[float]]) -> Iterator[Figure]:
    medians = {peer: median(each) for peer, each in times.items()}
    for peer, each in medians.items():
        yield Figure(subject, peer, "time", 1e3 * each, "ms")
        if peer != OURS:
            yield Figure(
                subject, f"{peer} / {OURS}", "time", each / medians[OURS], "x", "> 1" if peer == INDUCTOR else ""
            )


def attempt(task: Task, name: str, shape: KernelShape) -> Runs | None:
    """Whatever goes wrong is a failed check of this kernel, and the others are still to be timed."""
    try:
        return prepared(task, name, shape)
    except Exception as error:
        detail = f"{type(error).__name__}: {str(error).strip()[:400]}"
        task.say(Check(subject_of(name, shape), passed=False, detail=detail))
        return None


def prepare_all(task: Task) -> dict[str, Runs]:
    """By subject; as many as there is time for."""
    found: dict[str, Runs] = {}
    longest = 0.0
    for name, shape in shapes(here=task.here):
        if task.seconds_left < 2 * longest:
            task.say(LeftOut(subject_of(name, shape), "no time was left"))
            continue
        start = time.monotonic()
        if (runs := attempt(task, name, shape)) is not None:
            found[subject_of(name, shape)] = runs
        longest = max(longest, time.monotonic() - start)
    return found


def main() -> None:
    task = task_of(parser(__doc__).parse_args())
    if task.here:
        complete("cuda")
    with task.beside():
        found = prepare_all(task)
    with task.in_time(), task.alone():
        for subject, runs in found.items():
            if task.seconds_left < 0:
                task.say(LeftOut(subject, "no time was left"))
            else:
                take_times(task, subject, runs)


if __name__ == "__main__":
    main()
