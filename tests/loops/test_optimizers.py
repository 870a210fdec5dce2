"""Optimizers of all kinds on sharded parameters give the results of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers.optimization import Adafactor as HuggingFaceAdafactor

from moaic.device.handles import view_of
from moaic.runtime.controller import session
from moaic.runtime.protocol.statistics import Statistics
from tests.exact.example import Batch
from tests.exact.training import Call, Trainee
from tests.loops.compare import PLANS, Found, same, weights
from tests.loops.tiny import TINY

STEPS = 4


class Lion(Optimizer):
    """Signs of a momentum, as people write it themselves."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-3, decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                momentum: Tensor = state["momentum"]
                p.data.mul_(1 - group["lr"] * group["decay"])
                # A smooth sign: the true one would turn rounding into steps of full length.
                update = momentum.clone().mul_(first).add(p.grad, alpha=1 - first).mul_(1e3).tanh_()
                p.add_(update, alpha=-group["lr"])
                momentum.mul_(second).add_(p.grad, alpha=1 - second)


Make = Callable[[list[nn.Parameter]], Optimizer]
optim: Any = torch.optim

OPTIMIZERS: Mapping[str, Make] = {
    "adamw_foreach": lambda ps: optim.AdamW(ps, lr=1e-2, eps=1e-4, foreach=True),
    "adamw_fused": lambda ps: optim.AdamW(ps, lr=1e-2, eps=1e-4, fused=True),
    "adamw_loop": lambda ps: optim.AdamW(ps, lr=1e-2, eps=1e-4, foreach=False),
    "adamw_amsgrad": lambda ps: optim.AdamW(ps, lr=1e-2, eps=1e-4, amsgrad=True),
    "adamw_tensor_lr": lambda ps: optim.AdamW(ps, lr=torch.tensor(1e-2), eps=1e-4, foreach=False),
    "adam_maximize": lambda ps: optim.Adam(ps, lr=1e-2, eps=1e-4, weight_decay=0.1, maximize=True),
    "sgd": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd_loop": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.1, foreach=False),
    "sgd_fused": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "adafactor": lambda ps: optim.Adafactor(ps, lr=1e-2),
    "adafactor_foreach": lambda ps: optim.Adafactor(ps, lr=1e-2, foreach=True),
    "adafactor_of_transformers": HuggingFaceAdafactor,
    "lion": Lion,
    "rmsprop": lambda ps: optim.RMSprop(ps, lr=1e-3, eps=1e-3, momentum=0.9, centered=True),
    "adagrad": lambda ps: optim.Adagrad(ps, lr=1e-2, eps=1e-3),
    "adagrad_fused": lambda ps: optim.Adagrad(ps, lr=1e-2, eps=1e-3, fused=True),
    "nadam": lambda ps: optim.NAdam(ps, lr=1e-2, eps=1e-4),
    "radam": lambda ps: optim.RAdam(ps, lr=1e-2, eps=1e-4),
    "adamax": lambda ps: optim.Adamax(ps, lr=1e-2, eps=1e-3),
    "adadelta": lambda ps: optim.Adadelta(ps, lr=1.0, eps=1e-4),
    "asgd": lambda ps: optim.ASGD(ps, lr=1e-2),
    "muon": lambda ps: optim.Muon([p for p in ps if p.dim() == 2], lr=1e-2),
    "two_groups": lambda ps: optim.AdamW(
        [
            {"params": [p for p in ps if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in ps if p.dim() == 1], "weight_decay": 0.0, "lr": 3e-2},
        ],
        lr=1e-2,
        eps=1e-4,
    ),
}


@pytest.fixture(scope="module")
def trainee() -> Trainee:
    torch.compiler.reset()
    return Trainee(TINY)


def train(model: nn.Module, call: Call, make: Make) -> Found:
    optimizer = make(list(model.parameters()))
    losses: list[Tensor] = []
    for step in range(STEPS):
        loss: Tensor = call(**TINY.batch(step)).loss
        loss.backward()
        optimizer.step()
        model.zero_grad()
        losses.append(loss.detach())
    return [*losses, *weights(model)]


@pytest.fixture(scope="module")
def expected() -> dict[str, Found]:
    return {}


def often(index: int, plan: str) -> bool:
    """Whether CI tries an optimizer under a plan: each under sharded state, and under another plan in turn."""
    return plan in ("optimizer", PLANS[index % len(PLANS)])


CASES = [
    pytest.param(plan, name, marks=[] if often(index, plan) else pytest.mark.exact)
    for plan in (*PLANS, "optimizer")
    for index, name in enumerate(OPTIMIZERS)
]


@pytest.mark.parametrize(("plan", "optimizer"), CASES)
def test_it_trains_as_in_pytorch(trainee: Trainee, plan: str, optimizer: str, expected: dict[str, Found]) -> None:
    if optimizer not in expected:
        host = TINY.model()
        expected[optimizer] = train(host, host, OPTIMIZERS[optimizer])
    trainee.use(plan)
    same(train(trainee.model, trainee.call, OPTIMIZERS[optimizer]), expected[optimizer], 1e-4)


COMMANDS = {
    **dict.fromkeys(
        ("adamw_foreach", "adamw_fused", "adamw_amsgrad", "rmsprop", "adagrad", "nadam", "adamax", "sgd"), 20
    ),
    "two_groups": 30,
}
"""Most commands of a training step: of an optimizer's ops on lists, not of its parameters, of which there are eight."""


@pytest.mark.parametrize("optimizer", COMMANDS)
def test_a_step_has_as_many_commands_as_lists(trainee: Trainee, optimizer: str) -> None:
    """Under sharded gradients and state every parameter is cut before its update, and gathered after."""
    trainee.use("optimizer")
    made = OPTIMIZERS[optimizer](list(trainee.model.parameters()))
    sent: list[Statistics] = []
    for step in range(4):
        trainee.call(**TINY.batch(step)).loss.backward()
        made.step()
        trainee.model.zero_grad()
        sent.append(session.accelerator().stats())
    assert sent[3].commands - sent[2].commands == sent[2].commands - sent[1].commands <= COMMANDS[optimizer]
    assert sent[3].messages - sent[2].messages <= 2
    assert sent[3].sent - sent[2].sent <= 4096


@pytest.mark.parametrize("optimizer", ["adamw_foreach", "adagrad", "rmsprop"])
def test_the_state_is_sharded_as_the_gradients_are(trainee: Trainee, optimizer: str) -> None:
    trainee.use("optimizer")
    made = OPTIMIZERS[optimizer](list(trainee.model.parameters()))
    for step in range(2):
        trainee.call(**TINY.batch(step)).loss.backward()
        made.step()
        trainee.model.zero_grad()
    state = [tensor for entry in made.state.values() for tensor in entry.values() if tensor.numel() > 1]
    assert len(state) >= 8
    for tensor in state:
        parts = session.accelerator().parts(view_of(tensor).buffer)
        held = sum(len(part.ranks) * prod(box.sizes) for part in parts for box in part.boxes)
        assert held == tensor.numel(), parts


@pytest.mark.parametrize("plan", ["one", "dp2", "optimizer"])
@pytest.mark.parametrize("optimizer", ["adamw_foreach", "adamw_fused", "adamw_loop", "sgd"])
def test_training_goes_on_after_a_batch_that_fails(trainee: Trainee, plan: str, optimizer: str) -> None:
    """A plan may use one worker of two: the other one does not hear of the error, and holds replicas."""
    trainee.use(plan)
    made = OPTIMIZERS[optimizer](list(trainee.model.parameters()))

    def step(batch: Batch) -> Tensor:
        loss: Tensor = trainee.call(**batch).loss
        loss.backward()
        made.step()
        trainee.model.zero_grad()
        return loss.detach()

    batch = TINY.batch(0)
    losses = [step(batch) for _ in range(2)]
    bad = {**batch, "ids": batch["ids"].clone().fill_(1_000)}
    failed = step(bad)
    with pytest.raises(IndexError):
        failed.item()
    losses += [step(batch) for _ in range(5)]
    values = [float(loss) for loss in losses]
    assert values == sorted(values, reverse=True)
    before = weights(trainee.model)
    step(batch)
    assert all(not torch.equal(old, new) for old, new in zip(before, weights(trainee.model), strict=True))
