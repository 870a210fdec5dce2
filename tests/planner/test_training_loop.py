"""The number of steps is read from the training loop of a library, at the call of its model."""

from __future__ import annotations

from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from moaic.compile.planning import expected_steps
from moaic.compile.training_loop import planned_steps


class Asking(nn.Module):
    """A model that asks in its forward how many steps there will be."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.found: list[int | None] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        self.found.append(planned_steps())
        out = self.linear(x)
        return {"loss": (out - labels).square().mean(), "logits": out}


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_knows_its_steps(tmp_path: Path) -> None:
    from transformers.trainer import Trainer
    from transformers.training_args import TrainingArguments

    data: Any = [{"x": torch.ones(2), "labels": torch.ones(1)}] * 8
    model = Asking()
    given = TrainingArguments(
        str(tmp_path), num_train_epochs=3, per_device_train_batch_size=4, report_to=[], use_cpu=True, save_strategy="no"
    )
    trainer: Any = Trainer(model, given, train_dataset=data, eval_dataset=data)
    trainer.evaluate()
    assert set(model.found) == {None}
    model.found.clear()
    trainer.train()
    assert model.found == [6] * 6


@pytest.mark.parametrize(
    ("training", "batches", "steps"),
    [(True, 40, 40), (False, 40, None), (True, float("inf"), None), (True, None, None)],
)
def test_a_loop_of_lightning_knows_its_trainer(training: bool, batches: float | None, steps: int | None) -> None:
    """The library is not installed for the tests: its loop is a function of a module of that name."""
    loop = FunctionType(_ask.__code__, {"__name__": "lightning.pytorch.loops.training_epoch_loop"})
    trainer = SimpleNamespace(training=training, estimated_stepping_batches=batches)
    assert loop(SimpleNamespace(trainer=trainer, ask=planned_steps)) == steps


def _ask(self: Any) -> Any:
    return self.ask()


def test_the_user_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert expected_steps({}) == 1000
    monkeypatch.setenv("MOAI_EXPECTED_STEPS", "30")
    assert expected_steps({}) == 30
    assert expected_steps({"expected_steps": 7}) == 7
