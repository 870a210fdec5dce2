"""Dropout in plain PyTorch with the masks of a captured step: the random numbers of a key, computed in NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

Words = NDArray[np.uint32]

PADDED = 9
"""Arguments of `torch.lstm` of a sequence that is not packed."""


def mixed(words: Words) -> Words:
    """A bijection of 32-bit words, of which NumPy keeps the low bits of products."""
    words = (words ^ (words >> np.uint32(16))) * np.uint32(0x21F0AAAD)
    words = (words ^ (words >> np.uint32(15))) * np.uint32(0x735A2D97)
    return words ^ (words >> np.uint32(15))


def key_of_draw(key: Sequence[int], draw: int) -> Words:
    """The two words from which the draw of this number is made."""
    low = np.array([word & 0xFFFFFFFF for word in key], np.uint32)
    high = np.array([word >> 32 for word in key], np.uint32)
    words = mixed(mixed(low) ^ high)
    return mixed(words ^ mixed(words[::-1] + mixed(np.array([draw + 1], np.uint32))))


def uniform(key: Sequence[int], draw: int, shape: Sequence[int]) -> Tensor:
    """Numbers in [0, 1) of 24 bits, each from its place in the whole tensor."""
    first, second = key_of_draw(key, draw)
    words = mixed(mixed(np.arange(math.prod(shape), dtype=np.uint32) + first) ^ second)
    return torch.from_numpy((words >> np.uint32(8)).astype(np.float32)).reshape(tuple(shape)) * 2.0**-24


class Drawn(TorchFunctionMode):
    """Within it, the dropouts of a model draw from a key, one after the other."""

    def __init__(self, key: Sequence[int]) -> None:
        super().__init__()
        self.key = key
        self.draws = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if func is dropout:
            return self._dropout(*args, **given)
        if func is scaled_dot_product_attention and given.get("dropout_p", 0.0) > 0:
            return self._attention(*args, **given)
        if func is torch.lstm and len(args) == PADDED and args[5] and args[6]:
            return self._lstm(*args)
        return func(*args, **given)

    def _lstm(
        self,
        x: Tensor,
        states: Sequence[Tensor],
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        *form: bool,
    ) -> tuple[Tensor, ...]:
        """Layer by layer, each but the first after dropout; `form` is train, bidirectional and batch_first."""
        *_, batch_first = form
        share, begin = len(params) // num_layers, [state.chunk(num_layers) for state in states]
        last: list[tuple[Tensor, ...]] = []
        for index in range(num_layers):
            if index:
                by_time = x.transpose(0, 1) if batch_first else x
                dropped = self._dropout(by_time, dropout)
                x = dropped.transpose(0, 1) if batch_first else dropped
            own = list(params[index * share : (index + 1) * share])
            x, *ended = torch.lstm(x, [state[index] for state in begin], own, has_biases, 1, 0.0, *form)
            last.append(tuple(ended))
        return x, *map(torch.cat, zip(*last, strict=True))

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return x
        kept = uniform(self.key, self.draws, x.shape) > p
        self.draws += 1
        return x * kept / (1 - p)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """By its definition: what is hidden weighs nothing."""
        if enable_gqa:
            shared = query.shape[1] // key.shape[1]
            key, value = (heads.repeat_interleave(shared, 1) for heads in (key, value))
        scores = query @ key.mT * (scale or query.shape[-1] ** -0.5)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None:
            scores = scores.where(attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        return self._dropout(scores.softmax(-1), dropout_p) @ value
