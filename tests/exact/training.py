"""Training on the workers and in plain PyTorch, side by side, and how far apart they may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moaic.backend import GraphEngine
from moaic.capture.aot import capture_backend
from moaic.capture.from_fx import Captured, FxProgram
from moaic.planning import prepare, request_of
from tests.exact.models import Batch, Example

GRADIENT_TOLERANCE = 1e-5
"""Largest distance of a gradient, relative to its norm."""

LOSS_TOLERANCE = 1e-5
"""Largest distance of a loss, relative to it."""

PARAMETER_TOLERANCE = 1e-4
"""Largest distance of a parameter after training, relative to its norm: float32 rounding of some 20 steps, through the
square roots of AdamW."""

FLOOR = 1e-3
"""Norms below this share of the largest count as this share: some gradients are zero but for rounding."""

STEPS = 20

Gradients = dict[str, Tensor]
Parameters = dict[str, Tensor]

OPTIMIZERS: Mapping[str, Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]] = {
    # The epsilon keeps gradients that are zero but for rounding from becoming steps of full length.
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, eps=1e-4),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}

PLAIN = "dp=1,tp=1,micro_batches=1,recompute=saved,distribute_param=none"

PLANS: Mapping[str, Mapping[str, object]] = {
    name: {**dict(pair.split("=") for pair in PLAIN.split(",")), **changes}
    for name, changes in {
        "one": {},
        "dp2": {"dp": 2},
        "optimizer": {"dp": 2, "distribute_param": "optimizer"},
        "step": {"dp": 2, "distribute_param": "step"},
        "use": {"dp": 2, "distribute_param": "use"},
        "tp2": {"tp": 2},
        "mb4": {"micro_batches": 4},
        "dp2_mb2": {"dp": 2, "micro_batches": 2},
        "full": {"recompute": "full"},
    }.items()
}
"""Every decision of a plan, so that nothing is left to be searched for."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a training showed: its losses, and the parameters (and buffers) that it ended with."""

    losses: list[float]
    parameters: Parameters


def batches(example: Example) -> list[Batch]:
    """One batch per step, of which there are two kinds."""
    return [example.batch(step % 2) for step in range(STEPS)]


def gradients(model: nn.Module, call: Callable[..., Any], batch: Batch) -> Gradients:
    """Gradients of the loss, on the host; those of `model` are empty before and after."""
    call(**batch).loss.backward()
    found = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def train(model: nn.Module, call: Callable[..., Any], data: Sequence[Batch], optimizer: str) -> Run:
    """Trains `model`, called by `call`, one step per batch."""
    stepper = OPTIMIZERS[optimizer](model.parameters())
    losses: list[Tensor] = []
    for batch in data:
        loss: Tensor = call(**batch).loss
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        losses.append(loss.detach())
    return Run([loss.item() for loss in losses], {name: t.cpu() for name, t in model.state_dict().items()})


def check_gradients(found: Gradients, expected: Gradients) -> None:
    assert found.keys() == expected.keys()
    floor = FLOOR * max(gradient.norm().item() for gradient in expected.values())
    for name, wanted in expected.items():
        distance = (found[name] - wanted).norm().item() / max(wanted.norm().item(), floor)
        assert distance <= GRADIENT_TOLERANCE, f"the gradient of {name} is off by {distance:.1e} of its norm"


def check_run(found: Run, expected: Run) -> None:
    for step, (loss, wanted) in enumerate(zip(found.losses, expected.losses, strict=True)):
        assert abs(loss - wanted) <= LOSS_TOLERANCE * abs(wanted), f"step {step}: loss {loss}, wanted {wanted}"
    assert found.parameters.keys() == expected.parameters.keys()
    floor = FLOOR * max(value.float().norm().item() for value in expected.parameters.values())
    for name, wanted in expected.parameters.items():
        distance = (found.parameters[name] - wanted).float().norm().item() / max(wanted.float().norm().item(), floor)
        assert distance <= PARAMETER_TOLERANCE, f"{name} is off by {distance:.1e} of its norm after training"


class Reference:
    """A model in plain PyTorch, on the host."""

    def __init__(self, example: Example) -> None:
        self.example = example
        model = example.model()
        self.gradients = gradients(model, model, example.batch())
        self.runs: dict[str, Run] = {}

    def run(self, optimizer: str) -> Run:
        if optimizer not in self.runs:
            model = self.example.model()
            self.runs[optimizer] = train(model, model, batches(self.example), optimizer)
        return self.runs[optimizer]


class Trainee:
    """A model on the workers, captured once and run under one plan after the other, op by op."""

    def __init__(self, example: Example) -> None:
        prepare()
        self.example = example
        self.model = example.model().to("moai")
        self.compiled: Any = torch.compile(self.model, backend=self._capture, fullgraph=True)
        self.plan = "one"
        self.planted: Planted = lambda grads: grads
        """What becomes of the gradients: a bug, where the tests themselves are tested."""

    def _capture(self, graph_module: Any, examples: Sequence[Any]) -> Callable[..., Any]:
        return capture_backend(graph_module, examples, lambda program: Switch(program, self))

    def use(self, plan: str) -> None:
        """From now on run under this plan, from the first weights on."""
        self.plan = plan
        self._load()

    def _load(self) -> None:
        self.model.load_state_dict(self.example.model().state_dict())

    def call(self, **batch: Tensor) -> Any:
        return self.compiled(**{name: tensor.to("moai") for name, tensor in batch.items()})

    def gradients(self) -> Gradients:
        return gradients(self.model, self.call, self.example.batch())

    def run(self, optimizer: str) -> Run:
        self._load()
        return train(self.model, self.call, batches(self.example), optimizer)


Planted = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass
class Switch:
    """Runs a captured graph as its trainee's plan says; each plan numbers its own calls."""

    program: FxProgram
    trainee: Trainee
    engines: dict[str, GraphEngine] = field(default_factory=dict[str, GraphEngine])
    calls: dict[int, GraphEngine] = field(default_factory=dict[int, GraphEngine])

    def forward(self, captured: Captured, call: int | None, arguments: list[Tensor]) -> Sequence[Tensor]:
        engine = self._engine(self.trainee.plan)
        if call is not None:
            self.calls[call] = engine
        return engine.forward(captured, call, arguments)

    def _engine(self, plan: str) -> GraphEngine:
        if plan not in self.engines:
            self.engines[plan] = GraphEngine(self.program, request_of(PLANS[plan]), compiled=False)
        return self.engines[plan]

    def backward(self, captured: Captured, call: int, tangents: list[Tensor]) -> Sequence[Tensor]:
        return self.trainee.planted(self.calls[call].backward(captured, call, tangents))

    def forget(self, call: int) -> None:
        self.calls[call].forget(call)
