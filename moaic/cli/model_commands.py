"""Commands on scripts and models, and on this installation: capture, check, guide and doctor.

Each returns its exit code and raises Diagnostic.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from moaic.cli.exit_codes import WRONG
from moaic.cli.input_files import read_closed_module, read_text
from moaic.cli.random_inputs import check_runnable, random_inputs
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.ir.printer import render
from moaic.runtime.host.selection import current_flavor
from moaic.support.cache_folder import cache_folder
from moaic.support.output import write_output

if TYPE_CHECKING:
    from moaic.capture.trace_only import ModelSource, Sample
    from moaic.check.proof import CapturedStep
    from moaic.passes.perf.machine import Machine
    from moaic.predict.guide import Question

WORDS: Mapping[str, object] = {"true": True, "false": False, "null": None}
"""Those of JSON."""


def capture(chosen: argparse.Namespace) -> int:
    """`moaic capture`: writes the graph of a training step as IR text."""
    from moaic.capture.trace_only import take_model, take_script

    if chosen.source.endswith(".py"):
        taken = take_script(chosen.source, chosen.script_arguments)
    else:
        taken = take_model(*_model(chosen))
    text = render(Module((taken.captured.function,)))
    if chosen.output is None:
        print(text, end="")
    else:
        write_output(chosen.output, text)
    return 0


def check(chosen: argparse.Namespace) -> int:
    """`moaic check`: prints a verdict on each plan as soon as it is known, then their numbers.

    Returns WRONG where a plan fails, and where none passes.
    """
    from moaic.check.proof import ProofOutcome
    from moaic.check.report import Asked, Checked, VerdictTable, check, devices_from, summary
    from moaic.planner.request import parse_request

    if chosen.compile and not chosen.workers:
        raise Diagnostic("--compile is about real workers", hint="give --workers, too")
    request = parse_request(chosen.plan)
    asked = Asked(devices_from(chosen.devices), chosen.all_plans, request, chosen.workers, chosen.compile)
    step = _checked_step(chosen)
    table = VerdictTable(step, asked)
    print(table.head())
    verdicts: list[Checked] = []
    for checked in check(step, asked):
        verdicts.append(checked)
        print(table.line(checked), flush=True)
    print(f"\n{summary(verdicts)}")
    outcomes = {checked.verdict.outcome for checked in verdicts}
    return WRONG if ProofOutcome.FAIL in outcomes or ProofOutcome.PASS not in outcomes else 0


def _checked_step(chosen: argparse.Namespace) -> CapturedStep:
    """The step of a script, of a model made small, or of IR text with random inputs; in float64."""
    from moaic.capture.trace_only import take_script, take_small_model
    from moaic.check.proof import CapturedStep, step_of
    from moaic.check.report import LARGEST

    if chosen.source.endswith(".py"):
        return step_of(take_script(chosen.source, chosen.script_arguments))
    if not chosen.source.endswith(".moai"):
        return step_of(take_small_model(*_model(chosen), LARGEST))
    module = read_closed_module(chosen.source)
    check_runnable(module)
    return CapturedStep(module, tuple(random_inputs(module.main, 0))).cast("f64")


def doctor(chosen: argparse.Namespace) -> int:
    """`moaic doctor`: prints the findings on this installation. Returns WRONG where a first run would not work."""
    from moaic.tools.doctor import report

    text, works = report(os.environ)
    print(text)
    return 0 if works else WRONG


def guide(chosen: argparse.Namespace) -> int:
    """`moaic guide`: prints a Markdown table row by row; for GPUs also the sources of its numbers.

    Returns WRONG where no row has a plan.
    """
    from moaic.planner.processes import ProcessPool
    from moaic.predict import named_clusters
    from moaic.predict.guide import Estimate, answers, head, row, sources
    from moaic.runtime.host.cores import cores

    question = _question(chosen)
    estimates: list[Estimate] = []
    pool = ProcessPool(cores())
    pool.start()
    try:
        for answer in answers(question, pool):
            print(row(answer, question) if estimates else f"{head(answer.unit)}\n{row(answer, question)}", flush=True)
            estimates.append(answer)
    finally:
        pool.close()
    if chosen.machine is not None and named_clusters.is_cluster(chosen.machine):
        of_plans = [sources(answer) for answer in estimates if not answer.reason]
        kinds = [("", f"{each.name}:", "", *named_clusters.sources(each)) for each in question.machine.by_kind]
        print("\n".join([*chain.from_iterable(kinds), *of_plans]))
    return WRONG if all(answer.reason for answer in estimates) else 0


def _question(chosen: argparse.Namespace) -> Question:
    """The arguments of `moaic guide` as a Question. Raises Diagnostic."""
    from moaic.planner.request import parse_request
    from moaic.predict import named_clusters
    from moaic.predict.guide import WORKERS, Question
    from moaic.predict.kernel_cache import MadeKernels

    batches, request = _numbers("batch", chosen.batch), parse_request(chosen.plan)
    workers = None if chosen.workers is None else _numbers("workers", chosen.workers)
    kernels: MadeKernels | None = None
    if chosen.machine is not None and named_clusters.is_cluster(chosen.machine):
        cluster, said = named_clusters.cluster_and_workers(chosen.machine)
        workers = workers or (WORKERS if said is None else [said])
        if (target := cluster.device.target) is not None:
            kernels = MadeKernels(target, cache_folder(os.environ))
        machine = cluster.machine(max(workers), kernels.known if kernels else None)
    else:
        machine = _machine(chosen.machine)
    if chosen.kernels and kernels is None:
        raise Diagnostic("--kernels makes the kernels of GPUs", hint="name these too, such as --machine h100:8")
    return Question(
        _source(chosen),
        batches,
        chosen.sequence,
        machine,
        workers or WORKERS,
        request,
        padding=not chosen.no_padding,
        kernels=kernels if chosen.kernels else None,
        folder=chosen.output,
    )


def _machine(path: str | None) -> Machine:
    """The machine that a JSON file describes, or without a path this one, measured. Raises Diagnostic."""
    if path is None:
        from moaic.support.this_machine import this_machine

        # A machine that was measured before in this process is not asked for the flavor again.
        current_flavor(os.environ)
        return this_machine()
    from moaic.passes.perf.machine_text import from_text
    from moaic.predict.named_clusters import names

    if path != "-" and not Path(path).exists():
        raise Diagnostic(
            f"`{path}` is no file that describes a machine, and no cluster's name",
            hint=f"clusters are {', '.join(names())}; sixteen GPUs are h100:16",
        )
    return from_text(read_text(path), path)


def _numbers(name: str, text: str) -> list[int]:
    """`1,2,4` as numbers; raises Diagnostic that names the option `name`."""
    words = text.split(",")
    if not all(re.fullmatch(r"0*[1-9][0-9]{0,8}", word) for word in words):
        raise Diagnostic(f"--{name} takes whole numbers such as 1,2,4, not `{text}`")
    return [int(word) for word in words]


def _model(chosen: argparse.Namespace) -> tuple[ModelSource, Sample]:
    from moaic.capture.trace_only import Sample

    training = not chosen.inference
    return _source(chosen), Sample(chosen.batch, chosen.sequence, training=training, padding=not chosen.no_padding)


def _source(chosen: argparse.Namespace) -> ModelSource:
    from moaic.capture.trace_only import ModelSource

    return ModelSource(chosen.source, dict(map(_setting, chosen.set)), chosen.trust_remote_code)


def _setting(text: str) -> tuple[str, object]:
    """Name and value of `name=value`; the value is a literal of Python, a word of JSON, or text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise Diagnostic(f"a setting reads NAME=VALUE, not `{text}`")
    if value in WORDS:
        return name, WORDS[value]
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value
