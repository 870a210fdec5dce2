"""Changes of a batch, and the results that must not depend on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.exact.example import Batch
from tests.models.zoo import LENGTH, MODELS, VOCABULARY

CUT = LENGTH - 3
"""Where the future begins."""

READS_PADDING = ("recurrent", "recurrent_dropout")
"""Their layers go backwards through the padding, which changes their state."""

BOTH_WAYS = ("bert", "bert_dropout", *READS_PADDING)
SEES_ALL = (*BOTH_WAYS, "vit", "vit_dropout", "resnet")
PICTURES = ("vit", "vit_dropout", "resnet")
DOCUMENTS = ("llama_documents", "llama_documents_dropout")
TRANSLATES = ("t5", "t5_dropout")
WHOLE_LOSS = ("remote",)
"""Their loss has a penalty on the logits of padding."""


@dataclass(frozen=True, slots=True)
class Changed:
    """A batch, and what it has in common with the one that it was."""

    batch: Batch
    same: Tensor
    """Which logits: bool, [rows, length]."""
    learns_the_same: bool
    """Whether loss and gradients are the same, too."""


def others(ids: Tensor) -> Tensor:
    """Another token everywhere, none of them padding."""
    return ids % (VOCABULARY - 1) + 1


def hide(name: str) -> Changed:
    """Other tokens where the mask hides them: as padding, or from the other document of a row."""
    batch = MODELS[name].batch()
    ids = batch["input_ids"]
    if name in DOCUMENTS:
        second = batch["position_ids"] != torch.arange(LENGTH)
        return Changed({**batch, "input_ids": ids.where(second, others(ids))}, second, learns_the_same=False)
    seen = batch["attention_mask"].bool()
    same = torch.ones_like(seen) if name in TRANSLATES else seen
    changed = {**batch, "input_ids": ids.where(seen, others(ids))}
    return Changed(changed, same, learns_the_same=name not in WHOLE_LOSS)


def come_later(name: str) -> Changed:
    """Other tokens at the end: a decoder does not look there."""
    batch = MODELS[name].batch()
    past = torch.arange(LENGTH) < CUT
    same = past.expand(batch["input_ids"].shape)
    key = "labels" if name in TRANSLATES else "input_ids"
    return Changed({**batch, key: batch[key].where(past, others(batch[key].clamp(min=1)))}, same, learns_the_same=False)


Change = Callable[[str], Changed]

CHANGES: Mapping[str, tuple[Change, tuple[str, ...]]] = {
    "hide": (hide, tuple(name for name in MODELS if name not in PICTURES)),
    "come_later": (come_later, tuple(name for name in MODELS if name not in SEES_ALL)),
}
"""What may be done, and to the batches of which models."""


def turned(batch: Batch) -> Batch:
    """The rows in the opposite order."""
    return {key: tensor.flip(0) for key, tensor in batch.items()}
