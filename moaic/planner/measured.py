"""The best candidates priced again, with the measured times of exactly the kernels that they use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from moaic.ir.graph import Module
from moaic.ir.parser import parse
from moaic.passes.estimate.step_time import rated
from moaic.passes.perf.fusion import fuse
from moaic.passes.perf.machine import Machine
from moaic.passes.perf.numbers import Number
from moaic.planner.outcome import Candidate
from moaic.planner.pricer import Pricer

MeasureKernels = Callable[[Mapping[str, float]], Mapping[str, Number] | None]
"""Returns seconds of kernels, by text, given the seconds that each is expected to take; it may leave some out.

None where this is not the time to measure.
"""

NEAR: Final = 1.15
"""Price, relative to the best, up to which a candidate may be the best once its kernels are measured: rates are within
8 % for the plans of `bench/predictions.py`."""

MOST: Final = 4
"""Candidates that are priced again."""

SHORT: Final = 0.02
"""Seconds of a step below which calls and launches decide, not kernels."""


def kernels_of(machine: Machine) -> MeasureKernels | None:
    """What tells the kernels that were measured on a machine before; None where there are none."""
    known = machine.kernels
    if not known:
        return None
    return lambda expected: {text: known[text] for text in expected if text in known}


@dataclass(frozen=True, slots=True)
class _Asked(Mapping[str, Number]):
    """A table of kernels that knows none and notes which it is asked for."""

    texts: dict[str, None] = field(default_factory=dict[str, None])

    def __getitem__(self, text: str) -> Number:
        self.texts[text] = None
        raise KeyError(text)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Remeasured:
    """All candidates, the best of them priced again, and the machine with the kernels that were measured for them."""

    candidates: Sequence[Candidate]
    machine: Machine
    is_final: bool = True
    """Whether another search would find the same: not so where this was not the time to measure."""


def measured(
    step: Module, found: Sequence[Candidate], machine: Machine, steps: int, measure: MeasureKernels
) -> Remeasured:
    """Prices the best of the candidates again; none where the step is short, or nothing was measured."""
    possible = sorted((each for each in found if each.prediction), key=lambda each: each.price(steps))
    best = possible[0].price(steps)
    near = [each for each in possible if each.price(steps) <= NEAR * best][:MOST]
    if best < SHORT:
        return Remeasured(found, machine)
    kernels = measure(_expected(step, near, machine))
    if not kernels:
        return Remeasured(found, machine, is_final=kernels is not None)
    machine = replace(machine, kernels=kernels)
    pricer = Pricer(step, machine)
    again = {each.config: replace(each, prediction=pricer.price(each.config)[1], is_measured=True) for each in near}
    return Remeasured([again.get(each.config, each) for each in found], machine)


def _expected(step: Module, candidates: Sequence[Candidate], machine: Machine) -> dict[str, float]:
    """Seconds of the heavy kernels of candidates, by the machine's rates."""
    asked = _Asked()
    pricer = Pricer(step, replace(machine, kernels=asked))
    for each in candidates:
        pricer.price(each.config)
    return {text: by_rates(text, machine) for text in asked.texts}


def by_rates(text: str, machine: Machine) -> float:
    """Seconds that a kernel is expected to take by the machine's rates."""
    (function,) = parse(text).functions
    (kernel,) = fuse(function).kernels
    return rated(kernel, machine).value
