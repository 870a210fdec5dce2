"""Every candidate plan for 2, 4 and 8 ranks computes what the graph says: lowered, on virtual ranks, in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from moaic.ir.errors import Diagnostic
from moaic.ir.printer import render
from moaic.ir.verify import verify
from moaic.passes.build import Builder
from moaic.passes.candidates import candidates
from moaic.passes.config import Config, Request
from moaic.passes.program import Programs
from moaic.runtime.interpreter import run_function, run_ranks
from tests.exact.graphs import Step, captured_step
from tests.exact.models import CONTRAST, DROPOUT, EXAMPLES

MODELS = {**EXAMPLES, "dropout": DROPOUT, "contrast": CONTRAST}

TOLERANCE = 1e-10
"""Largest distance from the graph's result, relative to its largest element."""

FLOOR = 1e-3
"""Results whose largest element is a smaller share than this of that of all results are compared with this share: some
gradients, such as that of a bias on keys, are zero but for rounding."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are slower with two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Proof:
    """One model's step, what the graph says it computes, and the programs that were found to compute that."""

    def __init__(self, name: str) -> None:
        self.step = captured_step(MODELS[name])
        self.builder = Builder(self.step.module)
        self.expected = run_function(self.step.module, self.step.module.main.name, self.step.inputs)
        self.proved: set[str] = set()

    def configs(self, ranks: int) -> list[Config]:
        return [config for config in candidates(self.step.module, ranks, Request()) if config.ranks == ranks]

    def prove(self, config: Config) -> None:
        """Raises Diagnostic where there is no plan, AssertionError where it computes something else."""
        programs = self.builder.build(config).programs
        assert programs.backward is not None
        text = "".join(render(program) for program in (programs.joint, programs.forward, programs.backward))
        if text in self.proved:
            return
        for program in (programs.joint, programs.forward, programs.backward):
            verify(program)
        self._compare(joint(self.step, programs), config)
        self._compare(in_halves(self.step, programs), config)
        self.proved.add(text)

    def _compare(self, results: Sequence[Tensor], config: Config) -> None:
        main = self.step.module.main
        floor = FLOOR * max(wanted.abs().max().item() for wanted in self.expected)
        for index, (result, wanted) in enumerate(zip(results, self.expected, strict=True)):
            distance = (result - wanted).abs().max().item() / max(wanted.abs().max().item(), floor)
            assert distance <= TOLERANCE, f"{config}: {main.result_role(index)} is off by {distance:.1e}"


def joint(step: Step, programs: Programs) -> list[Tensor]:
    return run_ranks(programs.joint, [step.inputs[i] for i in programs.joint_params])


def in_halves(step: Step, programs: Programs) -> list[Tensor]:
    assert programs.backward is not None
    forward = run_ranks(programs.forward, [step.inputs[i] for i in programs.forward_params])
    outputs, saved = forward[: step.outputs], forward[step.outputs :]
    return outputs + run_ranks(programs.backward, saved + [step.inputs[i] for i in programs.backward_params])


@cache
def proof(name: str) -> Proof:
    return Proof(name)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_every_plan_computes_the_graph(name: str, ranks: int) -> None:
    work = proof(name)
    done: list[Config] = []
    for config in work.configs(ranks):
        try:
            work.prove(config)
        except Diagnostic:
            if not may_drop(name, config):
                raise
        else:
            done.append(config)
    assert done


@pytest.mark.parametrize("name", ["resnet", "contrast"])
def test_what_is_made_before_the_first_micro_batch_is_exact_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that are dropped for their price alone: nearly all of the forward runs once more, unsplit."""
    monkeypatch.setattr("moaic.passes.follow.PRE_LIMIT", float("inf"))
    work = Proof(name)
    configs = [config for config in work.configs(2) if config.micro_batches > 1]
    for config in configs:
        work.prove(config)
    assert configs


def may_drop(name: str, config: Config) -> bool:
    """What is known to be impossible: fewer heads than tensor-parallel ranks, losses and norms of a whole batch."""
    if name in ("resnet", "contrast"):
        return config.micro_batches > 1
    return config.tp > (2 if name == "qwen2" else 4)
