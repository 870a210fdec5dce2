"""What models do between matrices: captured it is as PyTorch has it, every op has a rule, and cut it is exact."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from moaic.capture.dry import take_call
from moaic.check import Fate, Proof, Step, plans_of, step_of
from moaic.check_workers import with_tangent_of_loss_alone
from moaic.ir.graph import Role
from moaic.ir.ops import OPS
from moaic.passes.config import parse_request
from moaic.runtime.interpreter import run_function

ROWS, LENGTH, WIDTH = 4, 6, 8

Form = Callable[[Tensor], Tensor]


def turned_pairs(x: Tensor) -> Tensor:
    """Rotary positions of GPT-J, GLM and Cohere: even and odd elements change places."""
    return x + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def every_third(x: Tensor) -> Tensor:
    """Of a dim that has no whole number of runs, from its middle."""
    return x[..., 1::3] * x[..., 2:8:3].sum(1, keepdim=True)[..., :1] + x[:, ::4].sum(1, keepdim=True)[..., :3]


def every_other_row(x: Tensor) -> Tensor:
    return x[::2] * x[1::2]


FORMS: Mapping[str, Form] = {form.__name__: form for form in (turned_pairs, every_third, every_other_row)}

PLANS = {"dp=2": 2, "micro_batches=2": 1, "dp=2,micro_batches=2": 2}
"""And for how many ranks."""

CROSSES_ROWS = {"every_other_row"}
"""What makes one value of several rows is not cut in time where that would make all of it again."""


class Around(nn.Module):
    """A form between two layers, and a loss of every row."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.before = nn.Linear(WIDTH, WIDTH)
        self.after = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found = self.form(self.after(torch.tanh(self.before(x)))[..., :WIDTH])
        return found.square().sum() / (ROWS * LENGTH)


@pytest.fixture(params=FORMS)
def name(request: pytest.FixtureRequest) -> str:
    torch.compiler.reset()
    return request.param


def captured(name: str) -> tuple[Step, dict[str, Tensor]]:
    """The step around a form, and what plain PyTorch makes of it in the same floating type."""
    torch.manual_seed(0)
    model, x = Around(FORMS[name]).double(), torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64)
    step = with_tangent_of_loss_alone(step_of(take_call(model, {"x": x})))
    loss = model(x)
    loss.backward()
    found = {label: parameter.grad for label, parameter in model.named_parameters() if parameter.grad is not None}
    return step, {**found, "loss": loss.detach()}


def test_a_form_is_captured_as_it_is_and_splits(name: str) -> None:
    step, expected = captured(name)
    main = step.module.main
    assert {op.name for op in main.ops} <= set(OPS)
    for index, result in enumerate(run_function(step.module, main.name, step.inputs)):
        torch.testing.assert_close(result, expected[_label(main.result_role(index))], rtol=1e-10, atol=1e-12)
    proof = Proof(step)
    for plan, ranks in PLANS.items():
        (config, *_) = plans_of(step.module, ranks, parse_request(plan))
        verdict = proof.verdict(config)
        dropped = verdict.fate is Fate.DROPPED and "needs the whole batch" in verdict.reason
        assert verdict.fate is Fate.PASS or (dropped and name in CROSSES_ROWS), verdict


def _label(role: Role) -> str:
    return role.label if role.kind == "grad" else "loss"
