"""A training loop with accelerate on the virtual accelerator: one process, and `accelerate config` was never run.

`accelerate_loop.py cpu` trains in plain PyTorch.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from accelerate import Accelerator  # pyright: ignore[reportMissingTypeStubs]
from tiny_llama import rows, tiny_llama
from torch.utils.data import DataLoader, TensorDataset


def train(device: str) -> list[float]:
    """The losses of two epochs, with gradients of two batches in each step."""
    if device == "moai":
        torch.moai.option.enable_advanced_parallelization()  # pyright: ignore[reportAttributeAccessIssue] there since moaic is installed
    accelerator: Any = Accelerator(cpu=device == "cpu", gradient_accumulation_steps=2)
    model: Any = tiny_llama()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data: Any = DataLoader(TensorDataset(rows(32)), batch_size=8)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses: list[float] = []
    for _ in range(2):
        for (ids,) in data:
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print("losses", *(f"{loss:.6f}" for loss in train(*sys.argv[1:] or ["moai"])))
