"""Scripts with sequences, written without a library of models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS = 20
WORDS, WIDTH = 64, 64
_utils: Any = torch.utils
checkpoint: Any = _utils.checkpoint.checkpoint


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.one(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.two(x))


class Language(nn.Module):
    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(128, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.checkpointed = checkpointed

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(x)


def next_word(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def accumulated_gradients(device: str) -> Iterator[float]:
    """A small GPT: four micro-steps a step, clipping, warm-up, weight decay for matrices alone."""
    model = Language().to(device)
    flat = [each for each in model.parameters() if each.dim() < 2]
    matrices = [each for each in model.parameters() if each.dim() >= 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    for _ in range(STEPS):
        total = 0.0
        for _ in range(4):
            loss = next_word(model, torch.randint(WORDS, (4, 33)).to(device)) / 4
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
        yield total


def gradient_checkpointing(device: str) -> Iterator[float]:
    """Layers are computed again in the backward."""
    model = Language(checkpointed=True).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        loss = next_word(model, torch.randint(WORDS, (8, 33)).to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, state = self.lstm(self.words(ids), state)
        return self.head(h), state


def truncated_backpropagation(device: str) -> Iterator[float]:
    """An LSTM whose state goes from step to step, detached."""
    model = Recurrent().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    state = (torch.zeros(2, 8, WIDTH, device=device), torch.zeros(2, 8, WIDTH, device=device))
    for _ in range(STEPS):
        ids = torch.randint(WORDS, (8, 17)).to(device)
        h, c = state
        logits, state = model(ids[:, :-1], (h.detach(), c.detach()))
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.25)
        optimizer.step()
        yield loss.item()


class Translation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.transformer = nn.Transformer(WIDTH, 4, 1, 1, 128, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        later = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        h = self.transformer(self.words(source), self.words(target), tgt_mask=later, src_key_padding_mask=source == 0)
        return self.head(h)


def translation(device: str) -> Iterator[float]:
    """An encoder and a decoder, rows of unequal lengths, label smoothing."""
    model = Translation().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98))
    for _ in range(STEPS):
        source, target = torch.randint(1, WORDS, (8, 20)), torch.randint(1, WORDS, (8, 16))
        source[torch.arange(20) >= torch.randint(8, 20, (8, 1))] = 0
        source, target = source.to(device), target.to(device)
        logits = model(source, target[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


class Experts(nn.Module):
    def __init__(self, count: int = 4, taken: int = 2) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, count)
        self.up = nn.Parameter(0.1 * torch.randn(count, WIDTH, 2 * WIDTH))
        self.down = nn.Parameter(0.1 * torch.randn(count, 2 * WIDTH, WIDTH))
        self.taken = taken

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.gate(x).softmax(-1).topk(self.taken, dim=-1)
        weights = torch.zeros_like(self.gate(x)).scatter(-1, chosen, scores / scores.sum(-1, keepdim=True))
        every = F.gelu(torch.einsum("bd,edf->ebf", x, self.up))
        return torch.einsum("ebf,efd,be->bd", every, self.down, weights)


def mixture_of_experts(device: str) -> Iterator[float]:
    """Each row is sent to two of four experts."""
    model = nn.Sequential(nn.Linear(32, WIDTH), Experts(), nn.Linear(WIDTH, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        loss = F.cross_entropy(model(torch.randn(64, 32).to(device)), torch.randint(10, (64,)).to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


SCRIPTS = (
    accumulated_gradients,
    gradient_checkpointing,
    truncated_backpropagation,
    translation,
    mixture_of_experts,
)
