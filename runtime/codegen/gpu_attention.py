"""Attention by the kernels of PyTorch for GPUs: one call forward, one backward, and no scores in memory.

There are two. Flash attention takes elements of 16 bits and no mask; memory-efficient attention takes float32 and
additive masks too. The operands that they take, and the results that differ from `moai.sdpa`, are taken from PyTorch's
sources, equal in 2.11 and 2.13 (aten/src/ATen/native/transformers: `attention.cpp`, `cuda/sdp_utils.cpp`,
`cuda/attention_backward.cu`, `cuda/mem_eff_attention/kernel_forward.h`). The order of sums over rows of queries is
undefined in their backwards, unless `torch.use_deterministic_algorithms` is on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, prod
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

aten: Final[Any] = torch.ops.aten
"""`contiguous` is an op here: the method would make the device the current one, and it may not be here."""

SHORT: Final = (torch.float16, torch.bfloat16)

LOADED: Final = 16
"""Bytes that the kernels load at once: where rows must begin."""

COLUMNS: Final = 8
"""Alignment of the rows of an additive mask, in elements."""

ROWS: Final = 32
"""The memory-efficient backward of NVIDIA reads the logsumexp of as many rows at once, past the last one too."""

Forward = Callable[["Attention"], tuple[Tensor, Tensor]]
Backward = Callable[["Attention", Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Attention:
    """The operands of both directions: query[B, H, M, D], key and value [B, H, N, D], numbers [b, h, m, n] added."""

    query: Tensor
    key: Tensor
    value: Tensor
    added: Tensor | None
    """Each dim whole or 1; -inf where a row must not look."""
    causal: bool
    scale: float


@dataclass(frozen=True, slots=True)
class Library:
    """The result and its logsumexp; the gradients of query, key and value from that of the result and from both."""

    forward: Forward
    backward: Backward


def library_for(asked: Attention, device: torch.device) -> Library | None:
    """The library for these operands on a GPU; None if neither takes them."""
    if device.type != "cuda" or not _is_plain(asked):
        return None
    element, width = asked.query.dtype, asked.query.shape[-1]
    is_new = torch.cuda.get_device_capability(device) >= (8, 0)
    # Its causal mask ends at the last row and column, that of the op begins at the first.
    is_square = not asked.causal or asked.query.shape[2] == asked.key.shape[2]
    if is_new and element in SHORT and asked.added is None and is_square and (width <= 192 or width == 256):
        return FLASH
    takes = is_new or element != torch.bfloat16
    return EFFICIENT if takes and (asked.added is None or not asked.causal) else None


def _is_plain(asked: Attention) -> bool:
    query, key, value, added = asked.query, asked.key, asked.value, asked.added
    return (
        query.dim() == 4
        and query.dtype in (torch.float32, *SHORT)
        and key.shape == value.shape
        and query.shape[-1] == key.shape[-1]
        and not query.shape[-1] * query.itemsize % LOADED
        and prod(query.shape) * prod(key.shape) > 0
        and (added is None or added.dtype == query.dtype)
    )


def _flash(asked: Attention) -> tuple[Tensor, Tensor]:
    operands = map(_loadable, (asked.query, asked.key, asked.value))
    out, logsumexp, *_ = aten._scaled_dot_product_flash_attention.default(
        *operands, 0.0, asked.causal, scale=asked.scale
    )
    return out, logsumexp


def _flash_backward(asked: Attention, grad: Tensor, out: Tensor, logsumexp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = map(_loadable, (asked.query, asked.key, asked.value))
    sizes = (None, None, query.shape[2], key.shape[2])
    return aten._scaled_dot_product_flash_attention_backward.default(
        grad,
        query,
        key,
        value,
        out,
        aten.contiguous(logsumexp),
        *sizes,
        0.0,
        asked.causal,
        *_no_seed(query),
        scale=asked.scale,
    )


def _efficient(asked: Attention) -> tuple[Tensor, Tensor]:
    operands = map(_loadable, (asked.query, asked.key, asked.value))
    out, logsumexp, *_ = aten._scaled_dot_product_efficient_attention.default(
        *operands, _bias(asked), True, 0.0, asked.causal, scale=asked.scale
    )
    logsumexp = logsumexp.narrow(-1, 0, asked.query.shape[2])
    if asked.added is None:
        return out, logsumexp
    # Of a row that may look at nothing the library's logsumexp is 0. The lowest number is nothing to it, as it
    # multiplies by log2 e first.
    sees = (asked.added > torch.finfo(asked.added.dtype).min).any(-1)
    return torch.where(sees.unsqueeze(-1), out, 0.0), torch.where(sees, logsumexp, -inf)


def _efficient_backward(
    asked: Attention, grad: Tensor, out: Tensor, logsumexp: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = map(_loadable, (asked.query, asked.key, asked.value))
    # Any finite number gives such a row the weights exp(-inf).
    finite = torch.where(logsumexp == -inf, 0.0, logsumexp)
    return aten._scaled_dot_product_efficient_attention_backward.default(
        *(_row_by_row(grad), query, key, value, _bias(asked), _row_by_row(out), _whole_rows(finite)),
        *(*_no_seed(query), 0.0, [True, True, True, False], asked.causal),
        scale=asked.scale,
    )[:3]


FLASH: Final = Library(_flash, _flash_backward)
EFFICIENT: Final = Library(_efficient, _efficient_backward)


def _loadable(x: Tensor) -> Tensor:
    """`x` with contiguous rows that begin where the kernels load; copied only if it has none."""
    starts = (x.storage_offset(), *x.stride()[:-1])
    is_loadable = x.stride(-1) == 1 and not any(start * x.itemsize % LOADED for start in starts)
    return x if is_loadable else aten.contiguous(x)


def _row_by_row(x: Tensor) -> Tensor:
    """[B, H, M, D] in the memory order [B, M, H, D], which the backward assumes."""
    return aten.contiguous(x.transpose(1, 2)).transpose(1, 2)


def _bias(asked: Attention) -> Tensor | None:
    """The numbers added to the scores as the kernels load them: [B, H, M, N], whose rows begin where these can load."""
    if asked.added is None:
        return None
    columns = asked.key.shape[2]
    added = asked.added.expand(*asked.added.shape[:-1], columns)
    padded = F.pad(added, (0, -columns % COLUMNS)) if columns % COLUMNS else aten.contiguous(added)
    return padded.narrow(-1, 0, columns).expand(*asked.query.shape[:3], columns)


def _whole_rows(logsumexp: Tensor) -> Tensor:
    """Padded to where the kernels read; weights of rows past the end are exp(-inf). AMD's take it as it is."""
    missing = 0 if torch.version.hip else -logsumexp.shape[-1] % ROWS
    return F.pad(logsumexp, (0, missing), value=inf) if missing else aten.contiguous(logsumexp)


def _no_seed(like: Tensor) -> tuple[Tensor, Tensor]:
    """The seed and offset of a dropout that is off: never read, and empty, so that no kernel fills them."""
    nothing = torch.empty((0,), dtype=torch.int64, device=like.device)
    return nothing, nothing
