"""Trains with the Trainer of transformers on the virtual accelerator: one line, and nothing is configured.

`hf_trainer.py cpu` lets the Trainer train in plain PyTorch.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from tiny_llama import rows, tiny_llama
from transformers import Trainer, TrainingArguments


def train(device: str) -> list[float]:
    """The losses of two epochs, then that of an evaluation."""
    if device == "moai":
        torch.moai.option.enable_advanced_parallelization()  # pyright: ignore[reportAttributeAccessIssue] there since moaic is installed
    data: Any = [{"input_ids": ids, "labels": ids} for ids in rows(32)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=device == "cpu",
            per_device_train_batch_size=8,
            num_train_epochs=2,
            learning_rate=1e-2,
            eval_strategy="epoch",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(model=tiny_llama(), args=arguments, train_dataset=data, eval_dataset=data[:8])
        trainer.train()
        logged = trainer.state.log_history
    return [entry[name] for name in ("loss", "eval_loss") for entry in logged if name in entry]


if __name__ == "__main__":
    print("losses", *(f"{loss:.6f}" for loss in train(*sys.argv[1:] or ["moai"])))
