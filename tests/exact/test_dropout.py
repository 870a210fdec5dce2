"""Dropout masks do not depend on the plan: they follow from the seed and the element alone."""

from __future__ import annotations

import pytest
import torch

from tests.exact.models import CONTRAST, DROPOUT, EXAMPLES, VOCABULARY
from tests.exact.training import PLANS, Gradients, Trainee, check, check_gradients, compiled, gradients

SEED = 7


@pytest.fixture(scope="module")
def trainee() -> Trainee:
    torch.compiler.reset()
    return Trainee(DROPOUT)


def drawn(trainee: Trainee, plan: str, seed: int = SEED) -> Gradients:
    """The gradients under a seed and a plan, the loss among them."""
    trainee.use(plan)
    torch.manual_seed(seed)
    loss = trainee.call(**trainee.example.batch()).loss
    loss.backward()
    found = {name: p.grad.cpu() for name, p in trainee.model.named_parameters() if p.grad is not None}
    trainee.model.zero_grad()
    return {**found, "loss": loss.detach().cpu()}


LONG = ("optimizer", "step", "mb4", "full")
"""Plans whose splits others have."""

DRAWN = [
    pytest.param(plan, marks=pytest.mark.exact) if plan in LONG else plan
    for plan in PLANS
    if plan not in ("one", "ep2")
]


@pytest.mark.parametrize("plan", DRAWN)
def test_a_plan_draws_what_one_device_draws(trainee: Trainee, plan: str) -> None:
    check_gradients(drawn(trainee, plan), drawn(trainee, "one"))


def test_a_seed_says_what_is_drawn(trainee: Trainee) -> None:
    first, again, other = (drawn(trainee, "dp2", seed)["loss"] for seed in (SEED, SEED, SEED + 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_every_step_draws_anew(trainee: Trainee) -> None:
    trainee.use("dp2_mb2")
    torch.manual_seed(SEED)
    batch = DROPOUT.batch()
    losses = {trainee.call(**batch).loss.item() for _ in range(3)}
    assert len(losses) == 3


def test_a_forward_that_is_run_again_draws_the_same(trainee: Trainee) -> None:
    """Read first, the loss is made by the forward alone; the backward that follows belongs to its masks."""
    whole = drawn(trainee, "dp2")
    trainee.use("dp2")
    torch.manual_seed(SEED)
    loss = trainee.call(**DROPOUT.batch()).loss
    assert loss.item() == pytest.approx(whole["loss"].item(), rel=1e-6)
    loss.backward()
    found = {name: p.grad.cpu() for name, p in trainee.model.named_parameters() if p.grad is not None}
    trainee.model.zero_grad()
    check_gradients({**found, "loss": loss.detach().cpu()}, whole)


def test_evaluation_drops_nothing(trainee: Trainee) -> None:
    trainee.use("dp2")
    trainee.model.eval()
    with torch.no_grad():
        found = trainee.call(**DROPOUT.batch()).logits.cpu()
        expected = EXAMPLES["gpt2"].model().eval()(**DROPOUT.batch()).logits
    trainee.model.train()
    assert found.shape[-1] == VOCABULARY
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_compiled_programs_draw_the_same() -> None:
    torch.compiler.reset()
    found: list[Gradients] = []
    for plan, is_compiled in (("dp2", True), ("one", False)):
        model = CONTRAST.model().to("moai")
        call = compiled(model, PLANS[plan], compile=is_compiled)
        torch.manual_seed(SEED)
        found.append(gradients(model, call, CONTRAST.batch()))
    check_gradients(*found)


STEPPED = ["dp2_mb2", "pp2", "tp2"]
"""Splits of rows, in time, between stages and of heads."""


def stepped(trainee: Trainee, plan: str, *, read_first: bool) -> dict[str, torch.Tensor]:
    """Losses and parameters of three steps, of a run of their own."""
    trainee.use(plan)
    optimizer = torch.optim.SGD(trainee.model.parameters(), lr=0.1)
    torch.manual_seed(SEED)
    losses: list[torch.Tensor] = []
    for seed in range(3):
        loss = trainee.call(**DROPOUT.batch(seed)).loss
        if read_first:
            loss.item()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return {"losses": torch.stack(losses), **{name: p.detach().cpu() for name, p in trainee.model.named_parameters()}}


@pytest.mark.parametrize("read_first", [False, True], ids=["joint", "split"])
@pytest.mark.parametrize("plan", STEPPED)
def test_every_step_of_a_plan_draws_what_one_device_draws(trainee: Trainee, plan: str, read_first: bool) -> None:
    check(stepped(trainee, plan, read_first=read_first), stepped(trainee, "one", read_first=False), 1e-5)


def test_a_second_run_with_a_seed_is_the_first(trainee: Trainee) -> None:
    first, again = (stepped(trainee, "dp2_mb2", read_first=False) for _ in range(2))
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())
