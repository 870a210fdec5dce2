"""Training on the workers beside plain PyTorch, and the tolerances of their comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from moaic.capture.aot import capture_backend
from moaic.capture.autocast import takes_precision
from moaic.capture.dynamo_patches import captures_whole
from moaic.capture.fx.captured import Instance
from moaic.capture.fx.program import FxProgram
from moaic.capture.pieces import Piece
from moaic.compile.backend import GraphEngine
from moaic.compile.planning import Planning, prepare, request_of
from moaic.ir.errors import Diagnostic
from moaic.runtime.host.env_flags import CompileMode
from tests.exact.example import Batch, Example

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

Call = Callable[..., Any]

Gradients = dict[str, Tensor]
Parameters = dict[str, Tensor]

OPTIMIZERS: Mapping[str, Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]] = {
    # The epsilon keeps gradients that are zero but for rounding from becoming steps of full length.
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, eps=1e-4),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}

Plan = Mapping[str, object]

PLAIN: Plan = {
    **dict.fromkeys(("pp", "dp", "tp", "cp", "ep", "micro_batches"), 1),
    "recompute": "saved",
    "distribute_param": "none",
}

PLANS: Mapping[str, Plan] = {
    "one": PLAIN,
    "dp2": {**PLAIN, "dp": 2},
    "optimizer": {**PLAIN, "dp": 2, "distribute_param": "optimizer"},
    "step": {**PLAIN, "dp": 2, "distribute_param": "step"},
    "use": {**PLAIN, "dp": 2, "distribute_param": "use"},
    "tp2": {**PLAIN, "tp": 2},
    "cp2": {**PLAIN, "cp": 2},
    "ep2": {**PLAIN, "ep": 2},
    "mb4": {**PLAIN, "micro_batches": 4},
    "dp2_mb2": {**PLAIN, "dp": 2, "micro_batches": 2},
    "full": {**PLAIN, "recompute": "full"},
    "pp2": {**PLAIN, "pp": 2, "micro_batches": 2, "schedule": "1f1b"},
}
"""Every decision of a plan, so that nothing is left to be searched for."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a training showed: its losses, and the parameters (and buffers) that it ended with."""

    losses: list[float]
    parameters: Parameters


def compiled(model: nn.Module, plan: Plan, **options: object) -> Call:
    """The model as a person compiles it, called with tensors that lie anywhere."""
    settings: Any = {**plan, **options}
    compiled_model: Any = torch.compile(model, backend="moai", fullgraph=True, options=settings)
    where = next(model.parameters()).device

    def call(**batch: Tensor) -> Any:
        return compiled_model(**{name: tensor.to(where) for name, tensor in batch.items()})

    return call


def batches(example: Example) -> list[Batch]:
    """One batch per step, of which there are two kinds."""
    return [example.batch(step % 2) for step in range(STEPS)]


def gradients(model: nn.Module, call: Call, batch: Batch) -> Gradients:
    """Gradients of the loss, on the host; those of `model` are empty before and after."""
    call(**batch).loss.backward()
    found = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def train(model: nn.Module, call: Call, data: Sequence[Batch], optimizer: str) -> Run:
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


def check(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float, what: str = "") -> None:
    """Compares by norms; small ones count as a share of the largest."""
    assert found.keys() == expected.keys()
    floor = FLOOR * max(map(norm, expected.values()))
    for name, wanted in expected.items():
        distance = norm(found[name].cpu().double() - wanted.double()) / max(norm(wanted), floor)
        assert distance <= tolerance, f"{what} {name} is off by {distance:.1e} of its norm"


def norm(tensor: Tensor) -> float:
    return float(tensor.double().square().sum().sqrt().item())


def check_gradients(found: Gradients, expected: Gradients) -> None:
    check(found, expected, GRADIENT_TOLERANCE, "the gradient of")


def check_run(found: Run, expected: Run) -> None:
    for step, (loss, wanted) in enumerate(zip(found.losses, expected.losses, strict=True)):
        assert abs(loss - wanted) <= LOSS_TOLERANCE * abs(wanted), f"step {step}: loss {loss}, wanted {wanted}"
    check(found.parameters, expected.parameters, PARAMETER_TOLERANCE, "after training")


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

    def __init__(self, example: Example, **options: object) -> None:
        prepare()
        self.example = example
        self.model = example.model().to("moai")
        backend, settings = takes_precision(captures_whole(partial(self._capture))), cast("Any", options)
        self.compiled: Any = torch.compile(self.model, backend=backend, fullgraph=True, options=settings)
        self.plan = "one"
        self.planted: Planted = lambda grads: grads
        """What becomes of the gradients: a bug, where the tests themselves are tested."""

    def _capture(self, graph_module: Any, examples: Sequence[Any], **_: object) -> Callable[..., Any]:
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
    """Runs a captured graph as its trainee's plan says: forward and backward of a call by the engine of one plan."""

    program: FxProgram
    trainee: Trainee
    engines: dict[str, GraphEngine] = field(default_factory=dict[str, GraphEngine])

    def forward(self, instance: Instance, arguments: list[Tensor]) -> tuple[Sequence[Tensor], Any]:
        engine = self._engine(self.trainee.plan)
        results, call = engine.forward(instance, arguments)
        return results, (engine, call)

    def _engine(self, plan: str) -> GraphEngine:
        if plan not in self.engines:
            self.engines[plan] = GraphEngine(
                self.program, Planning(request_of(PLANS[plan]), Piece()), compiling=CompileMode.NEVER
            )
        return self.engines[plan]

    def backward(self, instance: Instance, call: Any, tangents: list[Tensor]) -> Sequence[Tensor]:
        engine, made = call
        return self.trainee.planted(engine.backward(instance, made, tangents))

    def run_op_by_op(self, reason: Diagnostic) -> None:
        raise reason
