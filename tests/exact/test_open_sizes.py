"""Programs with open sizes are, at the sizes of a call, what is captured at these sizes, and so are their plans.

A program is captured once, for one batch; then its text is compared, and its plans run, with the numbers of others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from moaic.capture.aot import capture_backend
from moaic.capture.autocast import takes_precision
from moaic.capture.dynamo_patches import captures_whole
from moaic.capture.fx.captured import Captured, Instance
from moaic.capture.fx.program import FxProgram
from moaic.capture.trace_only import CapturedCall
from moaic.check.proof import (
    TOLERANCE,
    CapturedStep,
    Proof,
    ProofOutcome,
    compared,
    in_halves,
    in_one,
    one_of_each_kind,
    plans_of,
    sampled,
    step_of,
)
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.ir.printer import render
from moaic.ir.specialize import require_whole, specialized
from moaic.ir.verify import check_made
from moaic.passes.build import Builder
from moaic.passes.config import Config
from moaic.passes.lowering.programs import Programs, lower
from moaic.passes.transforms.to_float64 import promote
from moaic.runtime.rounding import rounding_by_shape
from tests.exact.example import Batch
from tests.models.zoo import LENGTH, MODELS, ROWS

# Bloom makes its activation as an object of an autograd function.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

EXAMPLE = (8, 6)
"""Rows and length of the batch for which the program is captured."""

OTHERS = ((4, 6), (8, 4), (4, 8), (2, 3), (6, 5), (3, 7))

SOME = ("bert_dropout", "resnet")
"""Models of which CI compares the programs."""

SAMPLE = {"bert_dropout": 2}
"""Of this one some plans for so many ranks, too. `make exact` proves more, of all."""

MOST = 3
"""Plans that are run per number of ranks in CI."""

FEW = 3
"""Sizes at which they are run."""


@dataclass(frozen=True)
class Opened:
    """A captured graph, and the sizes and arguments of one call of it."""

    program: FxProgram
    sizes: tuple[int, ...]
    arguments: tuple[Tensor, ...]


class _CalledError(BaseException):
    def __init__(self, call: Opened) -> None:
        super().__init__()
        self.call = call


class _Caught:
    """An engine that raises the first call."""

    def __init__(self, program: FxProgram) -> None:
        self.program = program

    def forward(self, instance: Instance, arguments: list[Tensor]) -> NoReturn:
        raise _CalledError(Opened(self.program, instance.sizes, tuple(each.detach() for each in arguments)))

    def backward(self, instance: Instance, call: object, tangents: list[Tensor]) -> NoReturn:
        raise AssertionError("no forward has run")

    def run_op_by_op(self, reason: Diagnostic) -> None:
        raise reason


def resized(batch: Batch, rows: int, length: int) -> Batch:
    """The first rows of a batch, and of texts and their masks the first tokens; these dims are dynamic."""
    is_text = "input_ids" in batch
    found: Batch = {}
    for name, tensor in batch.items():
        found[name] = tensor[(slice(rows), *(_tokens(size, length, is_text) for size in tensor.shape[1:]))].clone()
        dims = [dim for dim, size in enumerate(tensor.shape) if dim == 0 or (is_text and size == LENGTH)]
        torch._dynamo.mark_dynamic(found[name], dims)  # pyright: ignore[reportPrivateUsage]
    return found


def _tokens(size: int, length: int, is_text: bool) -> slice:
    return slice(length) if is_text and size == LENGTH else slice(None)


@cache
def compiled(name: str) -> tuple[Any, Batch]:
    torch.compiler.reset()

    @takes_precision
    @captures_whole
    def backend(graph: Any, examples: Sequence[Any], **settings: Any) -> Any:
        return capture_backend(graph, examples, _Caught)

    example = MODELS[name]
    return torch.compile(example.model(), backend=backend, fullgraph=True), example.batch()


def called(name: str, rows: int, length: int) -> Opened:
    model, batch = compiled(name)
    try:
        model(**resized(batch, rows, length))
    except _CalledError as caught:
        return caught.call
    raise AssertionError("the model ran without its backend")


def closed(call: Opened) -> Captured:
    """The program as it is captured for the sizes of this call."""
    return FxProgram(call.program.traced).instantiate(call.sizes).closed


def fresh(call: Opened) -> Captured:
    """The program with open sizes, of which nothing has been made."""
    return FxProgram(call.program.traced).instantiate(call.sizes).captured


def others(name: str) -> Iterator[Opened]:
    assert ROWS == LENGTH == max(rows for rows, _ in OTHERS)
    yield from (called(name, *sizes) for sizes in OTHERS)


NAMES = [each if each in SOME else pytest.param(each, marks=pytest.mark.exact) for each in MODELS]


@pytest.mark.parametrize("name", NAMES)
def test_an_open_program_is_the_program_of_each_size(name: str) -> None:
    usual = called(name, *EXAMPLE)
    captured, served = fresh(usual), 0
    assert captured.symbols.example
    module = Module((captured.function,))
    for call in others(name):
        if call.program is usual.program and captured.symbols.hold(call.sizes):
            at = specialized(module, captured.symbols.numbers(call.sizes))
            assert render(at) == render(Module((closed(call).function,)))
            served += 1
    assert served > len(OTHERS) // 2


@pytest.mark.parametrize(("name", "ranks"), SAMPLE.items())
def test_plans_with_open_sizes_compute_the_graph(name: str, ranks: int) -> None:
    assert prove(name, sampled(one_of_each_kind(plans(name, ranks)), MOST), list(others(name))[:FEW])


@pytest.mark.exact
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_all_plans_with_open_sizes_compute_the_graph(name: str, ranks: int) -> None:
    assert prove(name, one_of_each_kind(plans(name, ranks)), list(others(name))[:FEW])


def plans(name: str, ranks: int) -> list[Config]:
    return plans_of(Module((closed(called(name, *EXAMPLE)).function,)), ranks)


def prove(name: str, configs: Sequence[Config], calls: Sequence[Opened]) -> int:
    """The number of results, of plans at other sizes than the example's, that are those of one device."""
    usual = called(name, *EXAMPLE)
    steps = {call.sizes: step_of(CapturedCall(closed(call), call.arguments)) for call in calls}
    proofs = {sizes: Proof(step) for sizes, step in steps.items()}
    proved = 0
    for config in configs:
        captured = fresh(usual)
        programs = built(captured, config)
        for sizes, proof in proofs.items():
            if programs is not None and captured.symbols.hold(sizes):
                numbers = captured.symbols.numbers(sizes)
                check(config, proof, programs.at(numbers))
                proved += 1
    return proved


def built(captured: Captured, config: Config) -> Programs | None:
    """The programs of a plan, all of whose conditions are known to the symbols; None where there is no such plan."""
    try:
        plan = Builder(promote(Module((captured.function,)))).build(config)
    except Diagnostic:
        return None
    programs = lower(plan.module, ())
    for module in (programs.joint, programs.forward, programs.backward):
        if module is not None:
            require_whole(check_made(module, "lower"))
    return programs


def check(config: Config, proof: Proof, programs: Programs) -> None:
    step: CapturedStep = proof.step
    for module in (programs.joint, programs.forward, programs.backward):
        if module is not None:
            check_made(module, "specialize")
    with rounding_by_shape():
        for run in (in_one, in_halves):
            verdict = compared(config, step.module.main, run(step, programs), proof.expected, TOLERANCE)
            assert verdict.outcome is ProofOutcome.PASS, (
                config,
                [param.type for param in step.module.main.params][:2],
                verdict,
            )
