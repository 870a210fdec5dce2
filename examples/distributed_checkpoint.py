"""Stops a training and resumes it from a checkpoint that the workers write in parallel.

What `moaic.checkpoint` writes, `torch.distributed.checkpoint` reads, on any number of workers or none.
`distributed_checkpoint.py cpu` does all of it in plain PyTorch.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from tiny_llama import rows, tiny_llama

from moaic import checkpoint


class Training:
    """A model, its optimizer, and what is saved of both."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.model = tiny_llama().to(device)
        self.call: Any = torch.compile(self.model, backend="moai") if device == "moai" else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self) -> float:
        ids = rows(8).to(self.device)
        loss = self.call(input_ids=ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def train(device: str) -> list[float]:
    """Losses before the checkpoint, those of a new training after it, and that of the checkpoint on the CPU."""
    first = Training(device)
    losses = [first.step(), first.step()]
    second = Training(device)
    second.step()  # an optimizer has state, into which a checkpoint can be read, after its first step
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(first.state(), folder)
        state = second.state()
        checkpoint.load(state, folder)
        second.optimizer.load_state_dict(state["optimizer"])
        plain = tiny_llama()
        weights = {"model": plain.state_dict()}
        dcp.load(weights, checkpoint_id=folder, no_dist=True)  # pyright: ignore[reportPrivateImportUsage]
    losses += [second.step(), second.step()]
    losses.append(plain(input_ids=rows(8), labels=rows(8)).loss.item())
    return losses


if __name__ == "__main__":
    print(*(f"{loss:.4f}" for loss in train(sys.argv[1] if len(sys.argv) > 1 else "moai")))
