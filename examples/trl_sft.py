"""Fine-tunes with TRL's SFTTrainer on the virtual accelerator, which the trainer takes for the one GPU there is.

`trl_sft.py cpu` lets the trainer use plain PyTorch.
"""

# pyright: basic, reportMissingImports=false, reportPrivateImportUsage=false
# What this is about need not be installed.

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from datasets import Dataset
from tiny_llama import VOCABULARY, rows, tiny_llama
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer


def tokenizer() -> PreTrainedTokenizerFast:
    """One piece per token; the data is tokenized already."""
    pieces: Any = {f"t{number}": number for number in range(VOCABULARY)}
    made = Tokenizer(models.WordLevel(pieces, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="t0", pad_token="t0", eos_token="t1")


def train(device: str) -> list[float]:
    """The losses of four steps, as the trainer logs them."""
    moai: Any = torch.get_device_module("moai")
    if device == "moai":
        moai.option.enable_advanced_parallelization()
    with tempfile.TemporaryDirectory() as folder:
        settings = SFTConfig(
            output_dir=folder,
            use_cpu=device == "cpu",
            per_device_train_batch_size=8,
            max_steps=4,
            learning_rate=1e-2,
            logging_steps=1,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        data = Dataset.from_dict({"input_ids": rows(32).tolist()})
        trainer = SFTTrainer(tiny_llama(), args=settings, train_dataset=data, processing_class=tokenizer())
        trainer.train()
    if device == "moai":
        moai.option.disable_advanced_parallelization()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    print(*(f"{loss:.4f}" for loss in train(sys.argv[1] if len(sys.argv) > 1 else "moai")))
