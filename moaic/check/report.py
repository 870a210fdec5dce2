"""The report of `moaic check`: a verdict on each plan of a step for several numbers of devices, and a summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moaic.check.proof import ANY, CapturedStep, Proof, ProofOutcome, Verdict, one_of_each_kind, plans_of
from moaic.check.workers import WorkerProof, workers
from moaic.ir.errors import Diagnostic
from moaic.passes.config import Config, Request
from moaic.text.tables import Column, aligned_head, aligned_row

LARGEST = 1 << 26
"""Most parameters of a model that is checked, as it is run in float64 many times."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The arguments of a check: numbers of devices, choice of plans, and where they run."""

    devices: tuple[int, ...]
    all_plans: bool = False
    request: Request = ANY
    on_workers: bool = False
    compiled: bool = False


def devices_from(text: str) -> tuple[int, ...]:
    """The numbers of devices in `2,4,8`, without repetitions. Raises Diagnostic for any other text."""
    words = text.split(",")
    for word in words:
        if not word.isdigit() or int(word) < 1:
            raise Diagnostic(f"--devices takes numbers of devices such as 2,4,8, not `{text}`")
    return tuple(dict.fromkeys(map(int, words)))


@dataclass(frozen=True, slots=True)
class Checked:
    """The verdict on a plan for `devices` devices, run on virtual ranks or on workers."""

    devices: int
    on_workers: bool
    verdict: Verdict


def check(step: CapturedStep, asked: Asked) -> Iterator[Checked]:
    """Runs plan after plan and yields its verdict: all on virtual ranks, then, if asked for, all on workers."""
    proof = Proof(step)
    for devices in asked.devices:
        for config in chosen(step, devices, asked):
            yield Checked(devices, False, proof.verdict(config))
    if asked.on_workers:
        yield from _on_workers(step, asked)


def _on_workers(step: CapturedStep, asked: Asked) -> Iterator[Checked]:
    proof = WorkerProof(step, compiled=asked.compiled)
    for devices in asked.devices:
        with workers(devices) as accelerator:
            for config in chosen(step, devices, asked):
                yield Checked(devices, True, proof.verdict(config, accelerator))


def chosen(step: CapturedStep, devices: int, asked: Asked) -> Sequence[Config]:
    """The plans to check for one number of devices."""
    plans = plans_of(step.module, devices, asked.request)
    return plans if asked.all_plans else one_of_each_kind(plans)


class VerdictTable:
    """A table whose rows are printed while the verdicts are computed: the widths follow from the chosen plans.

    Raises Diagnostic where there is no plan to check.
    """

    def __init__(self, step: CapturedStep, asked: Asked) -> None:
        plans = [str(config) for devices in asked.devices for config in chosen(step, devices, asked)]
        if not plans:
            raise Diagnostic(
                f"no such plan takes exactly {' or '.join(map(str, asked.devices))} devices",
                hint="--devices N checks those that take N",
            )
        results = range(len(step.module.main.results))
        labels = [step.module.main.result_role(index).label for index in results]
        self._columns = (
            Column("plan", least=max(map(len, plans), default=0)),
            Column("devices", least=11),
            Column("loss off by", ">"),
            Column("gradients off by", ">"),
            Column("of", least=max(map(len, labels), default=0)),
            Column("verdict"),
        )

    def head(self) -> str:
        return aligned_head(self._columns)

    def line(self, checked: Checked) -> str:
        verdict = checked.verdict
        where = f"{checked.devices} workers" if checked.on_workers else f"{checked.devices} virtual"
        numbers = ("" if number is None else f"{number:.1e}" for number in (verdict.loss, verdict.gradient))
        outcome = f"{verdict.outcome.value}: {verdict.reason}" if verdict.reason else verdict.outcome.value
        return aligned_row(self._columns, (str(verdict.config), where, *numbers, verdict.where, outcome))


def summary(found: Sequence[Checked]) -> str:
    """Numbers of (model, plan) pairs by outcome, one line for virtual ranks and one for workers."""
    lines: list[str] = []
    for place, on_workers in (("virtual ranks", False), ("workers", True)):
        outcomes = Counter(checked.verdict.outcome for checked in found if checked.on_workers == on_workers)
        counts = [
            f"{outcomes[outcome]:,} {word}"
            for outcome, word in _WORDS.items()
            if outcomes[outcome] or outcome is ProofOutcome.PASS
        ]
        if outcomes:
            lines.append(f"{outcomes.total():,} (model, plan) pairs on {place}: {', '.join(counts)}")
    return "\n".join(lines)


_WORDS = {ProofOutcome.PASS: "passed", ProofOutcome.FAIL: "failed", ProofOutcome.DROPPED: "dropped"}
