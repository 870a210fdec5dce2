"""Logs a training on the virtual accelerator for TensorBoard: loss, weights and gradients of every step.

`tensorboard --logdir out/board` shows it. `tensorboard_log.py cpu` trains in plain PyTorch.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter


def train(device: str, folder: str = "out/board", steps: int = 5) -> list[float]:
    """The losses, which stand in the log too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    x, y = torch.randn(64, 16), torch.randn(64, 1)
    model, x, y = model.to(device), x.to(device), y.to(device)
    call = torch.compile(model, backend="moai") if device == "moai" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    with SummaryWriter(str(Path(folder) / device)) as board:
        for step in range(steps):
            loss = nn.functional.mse_loss(call(x), y)
            loss.backward()
            board.add_scalar("loss", loss, step)
            for name, parameter in model.named_parameters():
                board.add_histogram(f"weights/{name}", parameter, step)
                board.add_histogram(f"gradients/{name}", parameter.grad, step)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(*(f"{loss:.4f}" for loss in train(sys.argv[1] if len(sys.argv) > 1 else "moai")))
