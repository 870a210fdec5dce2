"""The data of a tutorial: a tokenizer and rows of token ids, prepared once and read by every training."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset
from transformers import AutoTokenizer

OUTPUT = Path("out/tutorial")
"""Where the tutorials write, below the folder that they are started in."""

DATASET = "dataset.pt"

BLOCK_SIZE = 128
"""Tokens of a row."""


def folder_of(family: str) -> Path:
    return OUTPUT / family


def positive(text: str) -> int:
    """A whole number from 1 on, as a flag's value."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 on")
    return int(text)


def arguments(family: str) -> argparse.Namespace:
    """What a person can say when data is prepared for `family`."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--model-name-or-path",
        default="small",
        help="a local folder, whose tokenizer is taken, or a built-in size, for which one is made",
    )
    parser.add_argument("--block-size", type=positive, default=BLOCK_SIZE, help="tokens of a row, padding included")
    parser.add_argument("--rows", type=positive, default=512, help="texts taken, each a row")
    args = parser.parse_args()
    args.folder = folder_of(family)
    return args


def downloaded_tokenizer(name_or_path: str) -> Any | None:
    """The tokenizer of a local folder; none for a built-in size, which has no tokenizer yet."""
    if not Path(name_or_path).is_dir():
        return None
    tokenizers: Any = AutoTokenizer
    tokenizer = tokenizers.from_pretrained(name_or_path, trust_remote_code=True)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def save(folder: Path, tokenizer: Any, encoded: Mapping[str, Tensor]) -> None:
    """Writes the tokenizer, and the rows as plain tensors: token ids, and a mask that is 0 where a row is filled up."""
    ids, mask = encoded["input_ids"], encoded["attention_mask"]
    tokenizer.save_pretrained(folder)
    torch.save({"input_ids": ids, "attention_mask": mask}, folder / DATASET)
    print(f"{len(ids)} rows of {ids.shape[1]} tokens, {mask.float().mean():.0%} of them text, in {folder / DATASET}")


def load_tokenizer(family: str) -> Any:
    tokenizers: Any = AutoTokenizer
    return tokenizers.from_pretrained(_prepared(family), trust_remote_code=True)


def load_dataset(family: str, block_size: int, config: Any) -> TensorDataset:
    """Token ids and masks of the prepared rows, cut to `block_size` tokens. Exits where the model cannot read them."""
    rows = torch.load(_prepared(family) / DATASET)
    ids, mask = rows["input_ids"], rows["attention_mask"]
    if block_size > ids.shape[1]:
        sys.exit(f"rows were prepared with {ids.shape[1]} tokens, not {block_size}; {_how(family, block_size)}")
    if block_size > getattr(config, "max_position_embeddings", block_size):
        sys.exit(f"--block-size {block_size}: the model reads at most {config.max_position_embeddings} tokens")
    if int(ids.max()) >= config.vocab_size:
        sys.exit(
            f"rows were prepared with another vocabulary than the model's {config.vocab_size} tokens; "
            f"{_how(family, block_size)} --model-name-or-path FOLDER_OF_THE_MODEL"
        )
    return TensorDataset(ids[:, :block_size], mask[:, :block_size])


def _prepared(family: str) -> Path:
    folder = folder_of(family)
    if not (folder / DATASET).exists():
        sys.exit(f"there is no {folder / DATASET} yet; {_how(family, BLOCK_SIZE)}")
    return folder


def _how(family: str, block_size: int) -> str:
    return f"prepare with: python tutorial/prepare_{family}.py --block-size {block_size}"
