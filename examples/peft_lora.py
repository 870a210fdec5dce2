"""Trains LoRA adapters with PEFT on the virtual accelerator, and merges them into the model for use anywhere.

`peft_lora.py cpu` does the same in plain PyTorch.
"""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from peft import LoraConfig, get_peft_model
from tiny_llama import rows, tiny_llama


def adapted() -> Any:
    """The model with adapters on its attention."""
    config: Any = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    return cast("Any", get_peft_model(tiny_llama(), config))


def train(device: str, steps: int = 6) -> list[float]:
    """The losses of the steps."""
    model = adapted().to(device)
    call = torch.compile(model, backend="moai") if device == "moai" else model
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    ids = rows(8).to(device)
    losses: list[float] = []
    for _ in range(steps):
        loss = call(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    merged = model.merge_and_unload().cpu()
    losses.append(merged(input_ids=rows(8), labels=rows(8)).loss.item())
    return losses


if __name__ == "__main__":
    print(*(f"{loss:.4f}" for loss in train(sys.argv[1] if len(sys.argv) > 1 else "moai")))
