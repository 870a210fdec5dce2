"""Trains with PyTorch Lightning on the virtual accelerator: one process, one device, however many workers it has.

`lightning_fit.py cpu` lets Lightning train in plain PyTorch.
"""

# pyright: basic, reportMissingImports=false
# What this is about need not be installed.

from __future__ import annotations

import sys
from typing import Any

import lightning
import torch
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from tiny_llama import rows, tiny_llama
from torch import Tensor


class MoaiAccelerator(Accelerator):
    """What Lightning asks of a kind of device; there is one of this kind, and it takes care of its own workers."""

    def setup_device(self, device: torch.device) -> None:
        """Nothing to set up: the workers start with the first tensor."""

    def teardown(self) -> None:
        """Nothing to undo: the workers end with the program."""

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("moai", 0)]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "moai"


class Learner(lightning.LightningModule):
    """A language model as Lightning wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = tiny_llama()
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        (ids,) = batch
        loss = self.model(input_ids=ids, labels=ids).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(device: str) -> list[float]:
    """The losses of two epochs."""
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows(32)), batch_size=8)
    learner = Learner()
    if device == "moai":
        learner.model.compile(backend="moai")
    kind = MoaiAccelerator() if device == "moai" else CPUAccelerator()
    strategy: Any = SingleDeviceStrategy(device=torch.device(device), accelerator=kind)
    trainer = lightning.Trainer(
        max_epochs=2,
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(learner, data)
    return learner.losses


if __name__ == "__main__":
    print(*(f"{loss:.4f}" for loss in train(sys.argv[1] if len(sys.argv) > 1 else "moai")))
