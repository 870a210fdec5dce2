"""A machine of GPUs, present or not, described by data sheets for the planner: `sm_90:8`.

Its rates are peaks, so predictions from them are lower bounds of a step's time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from moaic.ir.collectives import COMMUNICATING, sent_share
from moaic.ir.errors import Diagnostic
from moaic.passes.perf.machine import Link, Machine, MadeKernel, MeasureSource, Number
from moaic.runtime.host.gpu_specs import LAUNCH_SECONDS, TARGETS, Target, target_of
from moaic.runtime.host.memory import USABLE
from moaic.text.units import amount, duration

LATENCY: Final = Number(20e-6)
"""Seconds of latency of a collective on the GPUs of one host. Assumed."""


def is_target(text: str) -> bool:
    """Whether the argument of --machine names GPUs, not a file."""
    return text.partition(":")[0] in TARGETS


def target_and_workers(text: str) -> tuple[Target, int | None]:
    """The target of `sm_90` or `sm_90:8`, and the number of GPUs if it is given. Raises Diagnostic."""
    name, colon, number = text.partition(":")
    target = target_of(name)
    if not colon:
        return target, None
    if not number.isdecimal() or int(number) < 1:
        raise Diagnostic(f"`{number}` is no number of GPUs", hint=f"for example {name}:{target.together}")
    return target, int(number)


def machine_of(target: Target, workers: int, made: Mapping[str, tuple[MadeKernel, ...]]) -> Machine:
    """A host with `workers` GPUs and the known kernels. Raises Diagnostic for more GPUs than a host has."""
    if workers > target.together:
        raise Diagnostic(
            f"{workers} GPUs are more than the {target.together} of {target.device} that are joined in one host, and "
            "no data sheet says what lies between hosts",
            hint="describe the machine in a file, as docs/machines/h100.json does",
        )
    rates = {f"mm.{dtype}": _published(rate) for dtype, rate in target.matmul.items()}
    kinds = [name.removeprefix("moai.") for name in COMMUNICATING]
    return Machine(
        workers,
        int(USABLE * target.memory),
        _published(target.bandwidth),
        {**rates, "cheap.f32": _published(target.vector), "costly.f32": _published(target.vector)},
        {**{kind: _link(kind, target) for kind in kinds}, "send": _pair(target)},
        name=f"{target.device} ({target.name}), from its data sheet",
        launch=Number(LAUNCH_SECONDS),
        overlaps=True,
        made=made,
    )


def _link(kind: str, target: Target) -> Link:
    """The link of a collective of all GPUs of a host: each sends its share over all of its links at once."""
    rate = target.links / sent_share(f"moai.{kind}", target.together)
    return Link(LATENCY, _published(rate), target.together, target.direct)


def _pair(target: Target) -> Link:
    """The link from one GPU to another: the direct one, or all of its links through a switch."""
    rate = target.links / (target.together - 1) if target.direct else target.links
    return Link(LATENCY, _published(rate), 2)


def _published(value: float) -> Number:
    return Number(value, MeasureSource.PUBLISHED)


def sources(machine: Machine) -> Iterator[str]:
    """Every number of the machine with its source, as lines of a Markdown list."""
    share = f"{USABLE:.0%} ({MeasureSource.ASSUMED}) of a GPU's ({MeasureSource.PUBLISHED})"
    yield f"* memory for plans: {amount(machine.memory)}B, {share}"
    yield f"* bandwidth: {_rate(machine.bandwidth, 'B')}"
    for name, rate in machine.flops.items():
        yield f"* {name}: {_rate(rate, 'FLOP')}"
    for kind, link in machine.links.items():
        yield f"* {kind} over {link.ranks}: {_rate(link.rate, 'B')} of its larger side, after {_time(link.latency)}"
    yield f"* a kernel's launch: {_time(machine.launch)}; an instruction: {_time(machine.call_overhead)}"


def _rate(rate: Number, unit: str) -> str:
    return f"{amount(rate.value)}{unit}/s ({rate.source})"


def _time(seconds: Number) -> str:
    return f"{duration(seconds.value)} ({seconds.source})"
