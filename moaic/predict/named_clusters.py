"""Clusters by name: kinds of GPUs and their hosts, present or not, described for the planner: `h100:16`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final

from moaic.ir.errors import Diagnostic
from moaic.passes.perf.links import Level
from moaic.passes.perf.machine import Machine
from moaic.passes.perf.numbers import MeasureSource, Number
from moaic.predict.cluster_file import Cluster, read_cluster
from moaic.runtime.host.memory import USABLE
from moaic.text.units import amount, duration

FOLDER: Final = Path(__file__).parent / "clusters"

OF_TARGET: Final[Mapping[str, str]] = {"sm_90": "h100", "sm_80": "a100-80", "gfx942": "mi300x", "gfx90a": "mi250x"}
"""The cluster of each target that kernels are compiled for."""


@cache
def names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def is_cluster(text: str) -> bool:
    """Whether an argument names a cluster or its file."""
    name = text.partition(":")[0]
    return name in OF_TARGET or name in names() or _is_file(name)


def cluster_and_workers(text: str) -> tuple[Cluster, int | None]:
    """The cluster of `h100`, `h100:16` or `cluster.toml`, and the number of workers where it says one.

    Raises Diagnostic.
    """
    name, colon, number = text.partition(":")
    if _is_file(name):
        if not Path(text).is_file():
            hint = "numbers of workers go to --workers" if colon and Path(name).is_file() else ""
            why = "it is a folder" if Path(text).is_dir() else "there is no such file"
            raise Diagnostic(f"cannot read {text}: {why}", hint=hint)
        found = read_cluster(Path(text))
        return found, found.workers
    found = named_cluster(name)
    if not colon:
        return found, None
    if not re.fullmatch(r"[1-9][0-9]{0,6}", number):
        raise Diagnostic(f"`{number[:40]}` is no number of GPUs", hint=f"for example {name}:8, up to 9999999")
    return found, int(number)


def _is_file(name: str) -> bool:
    return Path(name).suffix == ".toml"


@cache
def named_cluster(name: str) -> Cluster:
    """The cluster of a name, or of a target. Raises Diagnostic for an unknown one."""
    name = OF_TARGET.get(name, name)
    if name not in names():
        raise Diagnostic(f"there is no cluster `{name}`", hint=f"choose one of {', '.join(names())}, or name a file")
    return read_cluster(FOLDER / f"{name}.toml")


def sources(machine: Machine) -> Iterator[str]:
    """Every number of the machine with its source, as lines of a Markdown list."""
    share = f"{USABLE:.0%} ({MeasureSource.ASSUMED}) of a GPU's ({MeasureSource.PUBLISHED})"
    yield f"* memory for plans: {amount(machine.memory)}B, {share}"
    yield f"* bandwidth: {_rate(machine.bandwidth, 'B')}"
    for name, rate in machine.flops.items():
        yield f"* {name}: {_rate(rate, 'FLOP')}"
    yield from map(_of_level, machine.levels)
    yield f"* a kernel's launch: {_time(machine.launch)}; an instruction: {_time(machine.call_overhead)}"


def _of_level(level: Level) -> str:
    pairs = ", over links between pairs" if level.direct else ""
    return f"* {level.name}: each sends {_rate(level.rate, 'B')}{pairs}, after {_time(level.latency)}"


def _rate(rate: Number, unit: str) -> str:
    return f"{amount(rate.value)}{unit}/s ({rate.source})"


def _time(seconds: Number) -> str:
    return f"{duration(seconds.value)} ({seconds.source})"
