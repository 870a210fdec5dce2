"""The command `moaic check`: plans of a step for some numbers of devices, a verdict on each, and how many passed."""

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
"""A model that is checked has at most so many parameters: it is run in float64, many times."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be checked."""

    devices: tuple[int, ...]
    all_plans: bool = False
    request: Request = ANY
    on_workers: bool = False
    compiled: bool = False


def devices_from(text: str) -> tuple[int, ...]:
    """`2,4,8`; raises Diagnostic for anything else."""
    words = text.split(",")
    for word in words:
        if not word.isdigit() or int(word) < 1:
            raise Diagnostic(f"--devices takes numbers of devices such as 2,4,8, not `{text}`")
    return tuple(dict.fromkeys(map(int, words)))


@dataclass(frozen=True, slots=True)
class Checked:
    """A plan that was run, for so many devices, on virtual ranks or on workers."""

    devices: int
    on_workers: bool
    verdict: Verdict


def check(step: CapturedStep, asked: Asked) -> Iterator[Checked]:
    """A verdict on plan after plan, as they are run."""
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
    """The plans that are checked for one number of devices."""
    plans = plans_of(step.module, devices, asked.request)
    return plans if asked.all_plans else one_of_each_kind(plans)


class VerdictTable:
    """A table whose rows are printed while the verdicts are computed: the widths follow from the chosen plans."""

    def __init__(self, step: CapturedStep, asked: Asked) -> None:
        plans = [str(config) for devices in asked.devices for config in chosen(step, devices, asked)]
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
        outcome = f"{verdict.fate.value}: {verdict.reason}" if verdict.reason else verdict.fate.value
        return aligned_row(self._columns, (str(verdict.config), where, *numbers, verdict.where, outcome))


def summary(found: Sequence[Checked]) -> str:
    """How many pairs of this model and a plan there were, by where they ran and by fate."""
    lines: list[str] = []
    for place, on_workers in (("virtual ranks", False), ("workers", True)):
        search_result = Counter(checked.verdict.fate for checked in found if checked.on_workers == on_workers)
        counts = [
            f"{search_result[fate]:,} {word}"
            for fate, word in _WORDS.items()
            if search_result[fate] or fate is ProofOutcome.PASS
        ]
        if search_result:
            lines.append(f"{search_result.total():,} (model, plan) pairs on {place}: {', '.join(counts)}")
    return "\n".join(lines)


_WORDS = {ProofOutcome.PASS: "passed", ProofOutcome.FAIL: "failed", ProofOutcome.DROPPED: "dropped"}
