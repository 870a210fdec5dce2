"""A training that starts from a checkpoint, as a program: `resume.py FILE_OR_FOLDER PLAN`.

Prints the digest of the state it found and the losses that followed.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from moaic import checkpoint
from tests.exact.training import PLAIN, Call, compiled
from tests.loops.tiny import TINY

ROWS = 12
FIRST = 3
STEPS = 3

State = dict[str, Any]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, fused=True)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, call: Call, steps: Sequence[int]) -> list[float]:
    losses: list[Tensor] = []
    for step in steps:
        loss: Tensor = call(**TINY.batch(step, ROWS)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def digest(state: Any) -> str:
    """Of every bit of every tensor, wherever it lies."""
    found = hashlib.sha256()
    for name, tensor in sorted(_tensors("", state)):
        found.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def _tensors(name: str, value: Any) -> list[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        return [(name, value)]
    if not isinstance(value, dict):
        return []
    items = list(cast("dict[Any, Any]", value).items())
    return [each for key, inner in items for each in _tensors(f"{name}.{key}", inner)]


def resumed(path: Path, model: nn.Module) -> tuple[torch.optim.Optimizer, State]:
    """The model and a new optimizer with the saved state: from a folder by all workers, from a file by this process."""
    optimizer = optimizer_of(model)
    if path.is_dir():
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad()
        state = state_of(model, optimizer)
        checkpoint.load(state, path)
    else:
        state = torch.load(path, map_location="cpu")
        model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return optimizer, state_of(model, optimizer)


def main() -> None:
    path, plan = sys.argv[1:]
    model = TINY.model().to("moai")
    optimizer, state = resumed(Path(path), model)
    sys.stdout.write(digest(state) + "\n")
    options = dict(part.split("=") for part in plan.split(","))
    call = compiled(model, {**PLAIN, **options, "compile": False})
    losses = train(model, optimizer, call, range(FIRST, FIRST + STEPS))
    sys.stdout.write(" ".join(map(str, losses)) + "\n")


if __name__ == "__main__":
    main()
