"""Scripts with models of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

STEPS = 30
WORDS = 256


def bert() -> Any:
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def gpt() -> Any:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=WORDS, n_embd=64, n_layer=2, n_head=4, n_positions=128, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
    )


def padded(rows: int, most: int) -> dict[str, Tensor]:
    """A batch that is padded to its own longest row."""
    lengths = torch.randint(8, most, (rows,))
    places = torch.arange(int(lengths.max()))
    mask = (places < lengths[:, None]).long()
    ids = torch.randint(1, WORDS, (rows, len(places))) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(2, (rows,))}


def fine_tuning_padded_to_longest(device: str) -> Iterator[float]:
    """Every batch has another length, the last one fewer rows."""
    model = bert().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        batch = padded(5 if step % 10 == 9 else 8, 64)
        loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def generation(device: str) -> Iterator[float]:
    """Greedy tokens with a cache, as what `generate` gives; yields each token's number."""
    model = gpt().to(device).eval()
    ids = torch.randint(1, WORDS, (2, 12)).to(device)
    for _ in range(3):
        ids = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
        for token in ids[0, -8:].tolist():
            yield float(token)


class Adapter(nn.Module):
    """A frozen layer with a product of two thin matrices beside it."""

    def __init__(self, layer: nn.Module, width: int, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)
        nn.init.normal_(self.up.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def low_rank_adapters(device: str) -> Iterator[float]:
    """A frozen model whose attention outputs get adapters."""
    model = gpt().requires_grad_(requires_grad=False)
    for block in model.transformer.h:
        block.attn.c_proj = Adapter(block.attn.c_proj, 64)
    model.to(device)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for _ in range(STEPS):
        ids = torch.randint(1, WORDS, (8, 32)).to(device)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def mixed_precision(device: str) -> Iterator[float]:
    """Autocast to bfloat16 with a scaler that does nothing, as scripts for several GPUs have it."""
    model = gpt().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device, enabled=False)
    for _ in range(STEPS):
        ids = torch.randint(1, WORDS, (8, 32)).to(device)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield loss.item()


SCRIPTS = (fine_tuning_padded_to_longest, generation, low_rank_adapters, mixed_precision)
