"""Trains on the virtual accelerator, saves the weights as safetensors, and goes on from them in plain PyTorch.

`safetensors_weights.py cpu` does all of it in plain PyTorch.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_model, save_model  # pyright: ignore[reportUnknownVariableType]
from tiny_llama import rows, tiny_llama


def train(device: str, steps: int = 3) -> list[float]:
    """The losses of the steps on the device, then of the saved model on the CPU."""
    model = tiny_llama().to(device)
    call = torch.compile(model, backend="moai") if device == "moai" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = rows(8).to(device)
    losses: list[float] = []
    for _ in range(steps):
        loss = call(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.safetensors")
        save_model(model, path)
        plain = tiny_llama()
        load_model(plain, path)
    losses.append(plain(input_ids=rows(8), labels=rows(8)).loss.item())
    return losses


if __name__ == "__main__":
    print(*(f"{loss:.4f}" for loss in train(sys.argv[1] if len(sys.argv) > 1 else "moai")))
