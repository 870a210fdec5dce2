"""Small models composed of drawn blocks, losses and ops on a whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS, WIDTH, LENGTH, ROWS = 12, 8, 4, 8


@dataclass(frozen=True)
class Drawn:
    """Pieces by name."""

    blocks: tuple[str, ...]
    """What a layer does, one after the other."""
    statistics: tuple[str, ...]
    loss: str
    cheap: bool
    """Whether statistics are of a branch of their own, not of what the loss is of."""
    layers: int = 1


class Layer(nn.Module):
    """Some blocks, each after a line of its own; layers that are alike are outlined, and recomputed."""

    def __init__(self, blocks: tuple[str, ...], words: nn.Embedding) -> None:
        super().__init__()
        self.blocks = blocks
        self.words = words
        self.lines = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in blocks)
        self.norm = nn.LayerNorm(WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.group_norm = nn.GroupNorm(2, WIDTH)
        self.experts = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 3)
        self.router = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor, h: Tensor) -> Tensor:
        for name, line in zip(self.blocks, self.lines, strict=True):
            h = BLOCKS[name](self, ids, line(h))
        return h


class Model(nn.Module):
    """Words in, a loss out."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.drawn = drawn
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer(drawn.blocks, self.words) for _ in range(drawn.layers))
        self.branch = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h: Tensor = self.words(ids)
        first = self.branch(h)
        for layer in self.layers:
            h = layer(ids, h)
        loss = LOSSES[self.drawn.loss](self, labels, h)
        for name in self.drawn.statistics:
            loss = loss + STATISTICS[name](self, ids, first if self.drawn.cheap else h)
        return loss


Block = Callable[[Layer, Tensor, Tensor], Tensor]
"""Of a layer, the words and the hidden states other hidden states."""

Piece = Callable[[Model, Tensor, Tensor], Tensor]
"""Of the model, the words or labels and the hidden states a scalar."""


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)
    labels = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)
    return {"ids": ids, "labels": torch.where(labels < 3, -100, labels)}


def _heads(h: Tensor) -> Tensor:
    return h.view(ROWS, LENGTH, 2, WIDTH // 2).transpose(1, 2)


def _merged(h: Tensor) -> Tensor:
    return h.transpose(1, 2).reshape(ROWS, LENGTH, WIDTH)


def _attention(layer: Layer, ids: Tensor, h: Tensor) -> Tensor:
    q = _heads(h)
    return _merged(functional.scaled_dot_product_attention(q, q, q, is_causal=True))


def _padded_attention(layer: Layer, ids: Tensor, h: Tensor) -> Tensor:
    q, seen = _heads(h), (ids != 0)[:, None, None, :] | torch.eye(LENGTH, dtype=torch.bool)
    return _merged(functional.scaled_dot_product_attention(q, q, q, attn_mask=seen))


def _dropped_attention(layer: Layer, ids: Tensor, h: Tensor) -> Tensor:
    q = _heads(h)
    return _merged(functional.scaled_dot_product_attention(q, q, q, dropout_p=0.2, is_causal=True))


def _rotated(layer: Layer, ids: Tensor, h: Tensor) -> Tensor:
    angle = torch.arange(LENGTH).unsqueeze(1) * torch.tensor([1.0, 0.1, 0.01, 0.001]).repeat(2)
    one, other = h.chunk(2, -1)
    return h * angle.cos() + torch.cat((-other, one), -1) * angle.sin()


def _routed(layer: Layer, ids: Tensor, h: Tensor) -> Tensor:
    weights, chosen = layer.router(h).softmax(-1).max(-1, keepdim=True)
    shares = (chosen == torch.arange(3)) * weights
    return torch.einsum("bsd,edf,bse->bsf", h, layer.experts, shares)


def _convolved(layer: Layer, ids: Tensor, h: Tensor) -> Tensor:
    return functional.conv1d(h.transpose(1, 2), layer.experts.permute(1, 2, 0), padding=1).transpose(1, 2)


def _pooled(layer: Layer, ids: Tensor, h: Tensor) -> Tensor:
    halves = functional.max_pool1d(h.transpose(1, 2), 2)
    return h + functional.interpolate(halves, scale_factor=2).transpose(1, 2)


def _summed_by_words(layer: Layer, ids: Tensor, h: Tensor) -> Tensor:
    places = ids.unsqueeze(-1).expand_as(h)
    return h + h.new_zeros(ROWS, WORDS, WIDTH).scatter_add(1, places, h).gather(1, places)


def _in_parts(dim: int) -> Block:
    """Parts of a dim that are not equally long, each weighted by its number."""

    def weigh(layer: Layer, ids: Tensor, h: Tensor) -> Tensor:
        return torch.cat([part * number for number, part in enumerate(h.chunk(3, dim), 1)], dim)

    return weigh


def _in_halves(layer: Layer, ids: Tensor, h: Tensor) -> Tensor:
    """Each row by one of the other half of the batch."""
    return h * h.view(2, ROWS // 2, LENGTH, WIDTH).flip(0).reshape(ROWS, LENGTH, WIDTH)


def _waves(layer: Layer, ids: Tensor, h: Tensor) -> Tensor:
    transforms: Any = torch.fft
    return transforms.irfft(transforms.rfft(h, dim=1) * 1j, n=LENGTH, dim=1)


def _rows_changed(layer: Layer, ids: Tensor, h: Tensor) -> Tensor:
    written = h.index_put((torch.tensor([0, 2, 5]), torch.tensor([1, 0, 3])), h[1, :3] * 2)
    return written.slice_scatter(h[:3] * 3, 0, 2, 5)


BLOCKS: Mapping[str, Block] = {
    "gelu": lambda m, ids, h: functional.gelu(h),
    "layer norm": lambda m, ids, h: m.norm(h),
    "batch norm": lambda m, ids, h: m.batch_norm(h.transpose(1, 2)).transpose(1, 2),
    "group norm": lambda m, ids, h: m.group_norm(h.transpose(1, 2)).transpose(1, 2),
    "dropout": lambda m, ids, h: functional.dropout(h, 0.2),
    "attention": _attention,
    "padded attention": _padded_attention,
    "dropped attention": _dropped_attention,
    "rotary": _rotated,
    "mixture": _routed,
    "masked": lambda m, ids, h: h * (ids != 0).unsqueeze(-1),
    "hard": lambda m, ids, h: h * (h >= h.amax(-1, keepdim=True)),
    "gated by a batch": lambda m, ids, h: h * (h > h.mean(0)),
    "centred": lambda m, ids, h: h - h.mean((0, 1)),
    "scaled": lambda m, ids, h: h / (h.std(0, keepdim=True) + 1),
    "ranged": lambda m, ids, h: (h - h.amin(0)) / (h.amax(0) - h.amin(0) + 1),
    "rolled rows": lambda m, ids, h: h + h.roll(1, 0),
    "rolled words": lambda m, ids, h: h + h.roll(1, 1),
    "turned": lambda m, ids, h: h + h.flip(0),
    "summed": lambda m, ids, h: h.cumsum(1),
    "sorted": lambda m, ids, h: h.sort(1).values,
    "picked": lambda m, ids, h: h + h.gather(1, ids.remainder(LENGTH).unsqueeze(-1).expand_as(h)),
    "picked rows": lambda m, ids, h: h + h.index_select(0, ids[:, 0].remainder(ROWS)),
    "embedded": lambda m, ids, h: h + m.words(ids.flip(1)),
    "clamped": lambda m, ids, h: h.clamp(min=h.mean(-1, keepdim=True)),
    "convolved": _convolved,
    "pooled": _pooled,
    "by words": _summed_by_words,
    "in parts": _in_parts(-1),
    "rows in parts": _in_parts(0),
    "in halves": _in_halves,
    "rows changed": _rows_changed,
    "root mean square": lambda m, ids, h: functional.rms_norm(h, (WIDTH,)),
    "normal rows": lambda m, ids, h: functional.layer_norm(h, (LENGTH, WIDTH)),
    "weighed rows": lambda m, ids, h: h * h.softmax(0),
    "few": lambda m, ids, h: h * torch.zeros_like(h).scatter(-1, h.topk(3, -1).indices, 1.0),
    "words first": lambda m, ids, h: (
        h.transpose(0, 1).reshape(-1, WIDTH).tanh().view(LENGTH, ROWS, WIDTH).transpose(0, 1)
    ),
    "lower": lambda m, ids, h: h + torch.tril(h @ h.mT) @ h / 8,
    "windows": lambda m, ids, h: h + functional.pad(h, (0, 0, 2, 0)).unfold(1, 3, 1).mean(-1),
    "waves": _waves,
    "places": lambda m, ids, h: h * (ids != 0).flatten().cumsum(0).view(ROWS, LENGTH, 1) / 10,
    "ranked": lambda m, ids, h: h + h.argsort(1) / 10,
}


def _cross_entropy(model: Model, labels: Tensor, h: Tensor) -> Tensor:
    return functional.cross_entropy((h @ model.words.weight.t()).flatten(0, 1), labels.flatten())


def _by_hand(model: Model, labels: Tensor, h: Tensor) -> Tensor:
    kept = labels >= 0
    found = (h @ model.words.weight.t()).log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(found * kept).sum() / kept.sum()


def _contrast(model: Model, labels: Tensor, h: Tensor) -> Tensor:
    rows = functional.normalize(h.mean(1), dim=-1)
    return functional.cross_entropy(rows @ rows.t() * 3, torch.arange(ROWS))


def _hardest(model: Model, labels: Tensor, h: Tensor) -> Tensor:
    rows = h.mean(1)
    apart = (rows[:, None] - rows[None]).square().sum(-1)
    return functional.relu(1 + apart.amax(1) - apart.mean(1)).mean()


def _next(model: Model, labels: Tensor, h: Tensor) -> Tensor:
    logits = h[:, :-1] @ model.words.weight.t()
    return functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1)


def _of_rows(model: Model, labels: Tensor, h: Tensor) -> Tensor:
    """The mean over rows of the mean over the words that a row has."""
    each = functional.cross_entropy((h @ model.words.weight.t()).transpose(1, 2), labels, reduction="none")
    return (each.sum(1) / (labels >= 0).sum(1).clamp(min=1)).mean()


def _last(model: Model, labels: Tensor, h: Tensor) -> Tensor:
    """Of the last word that a row has."""
    last = h[torch.arange(ROWS), (labels >= 0).sum(1) - 1]
    return functional.cross_entropy(last @ model.words.weight.t(), labels.amax(1))


LOSSES: Mapping[str, Piece] = {
    "cross entropy": _cross_entropy,
    "by hand": _by_hand,
    "squares": lambda m, labels, h: h.square().mean(),
    "binary": lambda m, labels, h: functional.binary_cross_entropy_with_logits(h[..., 0], (labels > 5).to(h.dtype)),
    "smooth": lambda m, labels, h: functional.smooth_l1_loss(h[..., 0], labels.to(h.dtype) / 10),
    "contrast": _contrast,
    "hardest": _hardest,
    "next": _next,
    "of rows": _of_rows,
    "last": _last,
    "between halves": lambda m, labels, h: functional.mse_loss(h[:4], h[4:]),
    "triplet": lambda m, labels, h: functional.triplet_margin_loss(h[:, 0], h[:, 1], h[:, 2]),
    "of neighbours": lambda m, labels, h: functional.kl_div(h.log_softmax(-1), h.roll(1, 0).softmax(-1)),
}


STATISTICS: Mapping[str, Piece] = {
    "max": lambda m, ids, h: h.max(),
    "min": lambda m, ids, h: h.min(),
    "amax": lambda m, ids, h: h.amax(0).square().sum(),
    "max of columns": lambda m, ids, h: h.max(0).values.square().sum(),
    "median": lambda m, ids, h: h.median(),
    "median of columns": lambda m, ids, h: h.median(0).values.square().sum(),
    "kth": lambda m, ids, h: h.flatten(1).kthvalue(2, 0).values.square().sum(),
    "infinity": lambda m, ids, h: h.abs().flatten().max(),
    "topk": lambda m, ids, h: h.flatten().topk(5).values.square().sum(),
    "sort": lambda m, ids, h: (h.flatten().sort().values * torch.arange(h.numel())).mean(),
    "above the mean": lambda m, ids, h: (h * (h > h.mean())).sum(),
    "the largest": lambda m, ids, h: (h * (h >= h.amax((0, 1)))).sum(),
    "spread": lambda m, ids, h: h.std(0).sum() + h.flatten(0, 1).var(0).sum(),
    "exponentials": lambda m, ids, h: h.logsumexp(0).sum(),
    "quantile": lambda m, ids, h: h.flatten().quantile(0.3),
    "rows by words": lambda m, ids, h: h.new_zeros(WORDS, WIDTH).index_add(0, ids[:, 0], h[:, 0]).square().sum(),
    "counted": lambda m, ids, h: h.sum() / (ids != 0).sum(),
    "by counts": lambda m, ids, h: (h.mean((1, 2)) * (1 / (1 + (ids == 3).sum(1)))).sum(),
    "argmax": lambda m, ids, h: h.index_select(0, h[:, 1, 2].argmax(0, keepdim=True)).square().sum(),
    "closest": lambda m, ids, h: h.flatten(1).index_select(0, h[:, 0, 0].argsort()[:2]).square().sum(),
    "summed rows": lambda m, ids, h: h.cumsum(0).square().mean(),
    "histogram": lambda m, ids, h: torch.histc(h.detach(), 5).square().mean() * h.mean() / 100,
    "balance": lambda m, ids, h: (h.softmax(-1).mean((0, 1)) * (h >= h.amax(-1, keepdim=True)).sum((0, 1))).sum(),
    "entropy": lambda m, ids, h: -(h.softmax(0) * h.log_softmax(0)).sum(),
    "apart": lambda m, ids, h: torch.pdist(h.flatten(1)).mean(),
    "product": lambda m, ids, h: (h[:, 0, 0].tanh() + 2).prod() / 1000,
    "every other": lambda m, ids, h: h[::2].square().mean() - h[1::3].mean(),
    "first and last": lambda m, ids, h: h[:3].sum() / 10 + h[-1].square().sum(),
    "covariance": lambda m, ids, h: (h.flatten(1).t() @ h.flatten(1)).square().mean(),
}
