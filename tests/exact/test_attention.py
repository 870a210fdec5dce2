"""Attention of drawn operands in captured steps: equal to float64, whole and under every split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from moaic.capture.trace_only import take_call
from moaic.check.proof import KEY, CapturedStep, Proof, ProofOutcome, step_of
from moaic.check.workers import with_tangent_of_loss_alone
from moaic.passes.config import Config
from tests.device.attention_cases import FLOATING, LAYOUTS, Attend, Case, attention, by_definition, cases, check_close
from tests.models.drawn import uniform

FEW = settings(max_examples=8, derandomize=True, database=None, deadline=None, phases=[Phase.explicit, Phase.generate])
MANY = settings(max_examples=1500, database=None, deadline=None)

EXACT = 1e-9
"""In float64."""

WIDTH = 6
"""Of what queries, keys and values are made from."""

PLANS = (
    Config(dp=2),
    Config(tp=2),
    Config(micro_batches=2),
    Config(dp=2, micro_batches=2, recompute="full"),
    Config(cp=2),
    Config(cp=2, gather_keys=False),
    Config(dp=2, tp=2, cp=2),
    Config(pp=2, micro_batches=2),
)


class Attending(nn.Module):
    """One attention of what is made from a batch; without `y` to itself, so that the sequence can be split."""

    def __init__(self, case: Case, attend: Attend = attention) -> None:
        super().__init__()
        self.case = case
        self.attend = attend
        generator = torch.Generator().manual_seed(case.seed)
        sizes = [(WIDTH, prod(shape[-3:]) // shape[-2]) for shape in case.shapes]
        drawn = [torch.randn(size, generator=generator, dtype=torch.float64) / 2 for size in sizes]
        self.lines = nn.ParameterList(each.to(case.dtype) for each in drawn)
        self.bias = nn.Parameter(case.tensors()[3]) if learns_its_mask(case) else None

    def forward(self, x: Tensor, y: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        given = x if y is None else y
        operands = [self.operand(index, source) for index, source in enumerate((x, given, given))]
        mask = mask if self.bias is None else self.bias
        return self.attend(*operands, mask, self.case.dropout, **self.case.flags()).square().mean()

    def operand(self, index: int, source: Tensor) -> Tensor:
        shape, made = self.case.shapes[index], source @ self.lines[index]
        heads = made.unflatten(-1, (shape[-3], shape[-1])).transpose(-3, -2) if len(shape) > 2 else made
        return LAYOUTS[self.case.layouts[index]](heads)


def learns_its_mask(case: Case) -> bool:
    return case.mask in FLOATING and case.learned[3]


def batch_of(case: Case) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(case.seed + 1)
    query, key, _ = case.shapes
    shapes = {"x": (*query[:-3], query[-2], WIDTH), "y": (*query[:-3], key[-2], WIDTH)}
    if query[-2] == key[-2]:
        del shapes["y"]
    found = {name: torch.randn(shape, generator=generator).to(case.dtype) for name, shape in shapes.items()}
    masks = {} if case.mask == "none" or learns_its_mask(case) else {"mask": case.tensors()[3]}
    return found | masks


def captured(case: Case) -> CapturedStep:
    torch.compiler.reset()
    there = {name: tensor.to("moai") for name, tensor in batch_of(case).items()}
    return with_tangent_of_loss_alone(step_of(take_call(Attending(case).to("moai"), there)))


def kept_of(case: Case) -> Tensor | None:
    """The weights that a step keeps, drawn here anew."""
    query, key, _ = case.shapes
    return uniform(KEY, 0, (*query[:-1], key[-2])) > case.dropout if case.dropout else None


def wanted(case: Case) -> list[Tensor]:
    """The loss and the gradients of what is learned, in float64."""
    model = Attending(case, partial(by_definition, kept=kept_of(case))).double()
    batch = batch_of(case)
    loss = model(**{name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in batch.items()})
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def prove(case: Case, plans: Sequence[Config]) -> None:
    proof, expected = Proof(captured(case)), wanted(case)
    for found, other in zip(in_order(case, proof), expected, strict=True):
        check_close(found, other, EXACT)
    for config in plans:
        verdict = proof.verdict(config)
        assert verdict.outcome is not ProofOutcome.FAIL, (str(config), verdict.reason)


def in_order(case: Case, proof: Proof) -> list[Tensor]:
    """What the step gives, gradients in the order of the model's parameters."""
    main = proof.step.module.main
    named = {main.result_role(index).label: tensor for index, tensor in enumerate(proof.expected)}
    grads = [named[name] for name, _ in Attending(case).named_parameters()]
    return [proof.expected[0], *grads]


def dropping(case: Case, dropout: float) -> Case:
    return replace(case, dropout=dropout)


CASES = st.builds(
    dropping,
    st.one_of(
        # Some can be split along every dim, some not.
        cases(batches=((4,), (4,), (4, 3), ()), lengths=((4, 4), (8, 8), (4, 8), (8, 4))),
        cases(batches=((2,),), lengths=((5, 5), (1, 4), (3, 6))),
    ),
    st.sampled_from([0.0, 0.0, 0.3]),
)


COLUMNS = Case(0, torch.float32, ((4, 2, 4, 8),) * 3, ("columns", "every other column", "columns"))


@FEW
@example(COLUMNS, list(PLANS[:1]))
@given(CASES, st.lists(st.sampled_from(PLANS), min_size=3, max_size=3, unique=True))
def test_splits_of_attention_are_exact(case: Case, plans: list[Config]) -> None:
    prove(case, plans)


@pytest.mark.exact
@pytest.mark.timeout(7200)
@MANY
@given(CASES)
def test_splits_of_attention_are_exact_in_many_cases(case: Case) -> None:
    prove(case, PLANS)
