"""PyTorch's own kernels for GPUs, those that CPUs do not have or that lay out their results otherwise, on the host.

They refuse operands that the kernels of a GPU would misread, and what those leave undefined is NaN here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from math import inf, nan
from typing import Any, Final

import torch
from torch import Tensor

from moaic.runtime.codegen import attention_math
from moaic.runtime.codegen.gpu_answers import has_channels_last
from moaic.runtime.codegen.gpu_attention import COLUMNS, LOADED, ROWS, SHORT
from moaic.runtime.kernels.operators import NAMESPACE, OPERATORS

CONVOLUTIONS: Final = ("convolution", "convolution_backward")


def register_kernels() -> tuple[Any, ...]:
    """Registers them and moaic's own for tensors of the host in this process, as long as what is returned stands."""
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in _ATTENTION.items():
        library.impl(name, kernel, "CPU")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of kernels that are replaced
        for name in CONVOLUTIONS:
            plain = torch.library.get_kernel(f"aten::{name}", "CPU")
            library.impl(name, _as_on_gpus(plain), "CPU", with_keyset=True)
        own = torch.library.Library(NAMESPACE, "IMPL")
        for operator in OPERATORS:
            # Those that the package registered for every device.
            own.impl(operator.name, operator.on_gpu, "CPU", allow_override=True)
    return library, own


def _as_on_gpus(plain: Any) -> Callable[..., Any]:
    """A convolution whose results have the channels last if those of an operand are, as cuDNN and MIOpen do it."""

    def run(keys: Any, *operands: Any, **named: Any) -> Any:
        results = plain.call_boxed(keys, *operands, **named)
        tensors = [each for each in operands if isinstance(each, Tensor)]
        if not any(has_channels_last(each) for each in tensors):
            return results
        return _channels_last(results) if isinstance(results, Tensor) else tuple(map(_channels_last, results))

    return run


def _channels_last(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.dim() < 4 else x.contiguous(memory_format=_format(x))


def _format(x: Tensor) -> torch.memory_format:
    return torch.channels_last if x.dim() == 4 else torch.channels_last_3d


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    wants_logsumexp: bool,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    assert not dropout
    _check_rows(query, key, value, bias)
    out, logsumexp = attention_math.forward(query, key, value, bias, causal, _scale(query, scale))
    sees = logsumexp > -inf
    result = _by_rows(query.shape[:3] + value.shape[3:], query)
    result.copy_(torch.where(sees.unsqueeze(-1), out, nan))
    # AMD's has no rows past the end; PyTorch compiles for that only where such a GPU is.
    rows = -(-query.shape[2] // ROWS) * ROWS
    padded = logsumexp.new_full((*query.shape[:2], rows if wants_logsumexp else 0), nan)
    if wants_logsumexp:
        padded.narrow(-1, 0, query.shape[2]).copy_(torch.where(sees, logsumexp, 0.0))
    return result, padded, *(torch.zeros((), dtype=torch.int64) for _ in range(2))


def _efficient_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    seed: Tensor,
    offset: Tensor,
    dropout: float,
    wanted: Sequence[bool],
    causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    assert not dropout
    assert not wanted[3]
    _check_rows(query, key, value, bias)
    rows = query.shape[2]
    for each in (grad, out):
        assert each.transpose(1, 2).is_contiguous(), f"rows of {each.stride()} are not one after the other"
    assert logsumexp.is_contiguous()
    assert torch.version.hip or not logsumexp.shape[-1] % ROWS, "read past the end"
    assert (logsumexp.narrow(-1, rows, logsumexp.shape[-1] - rows) == inf).all(), "rows past the end have weights"
    mine = logsumexp.narrow(-1, 0, rows)
    assert mine.isfinite().all(), "exp(inf - inf)"
    grads = attention_math.backward(grad, query, key, value, out, mine, bias, causal, _scale(query, scale))
    likes = zip((query, key, value), grads, strict=True)
    return *(_by_rows(like.shape, like).copy_(made) for like, made in likes), None


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float = 0.0,
    causal: bool = False,
    wants_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    assert not dropout
    assert not wants_mask
    _check_flash(query, key, value, causal)
    out, logsumexp = attention_math.forward(query, key, value, None, causal, _scale(query, scale))
    nothing = torch.empty(0, dtype=query.dtype)
    state = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    lengths = query.shape[2], key.shape[2]
    return torch.empty_like(query).copy_(out), logsumexp, None, None, *lengths, *state, nothing


def _flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    starts_of_queries: Tensor | None,
    starts_of_keys: Tensor | None,
    queries: int,
    keys: int,
    dropout: float,
    causal: bool,
    seed: Tensor,
    offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    assert not dropout
    assert (queries, keys) == (query.shape[2], key.shape[2])
    _check_flash(query, key, value, causal)
    assert logsumexp.is_contiguous()
    grads = attention_math.backward(grad, query, key, value, out, logsumexp, None, causal, _scale(query, scale))
    return tuple(torch.empty_like(like).copy_(made) for like, made in zip((query, key, value), grads, strict=True))


_ATTENTION: Final = {
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
}


def _check_flash(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> None:
    assert query.dtype in SHORT
    assert not causal or query.shape[2] == key.shape[2], "its causal mask ends at the last row and column"
    _check_rows(query, key, value, None)


def _check_rows(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> None:
    """Rows must begin where the kernels load."""
    for each in (query, key, value):
        starts = (each.storage_offset(), *each.stride()[:-1])
        assert each.stride(-1) == 1, f"{each.stride()}: the elements of a row are not one after the other"
        assert not any(start * each.itemsize % LOADED for start in starts), f"{starts} is not where 16 bytes begin"
    if bias is not None:
        assert bias.shape == (*query.shape[:3], key.shape[2])
        assert bias.dtype == query.dtype
        assert bias.stride(-1) == 1
        assert not any(step % COLUMNS for step in bias.stride()[:-1]), f"a bias of {bias.stride()}"


def _scale(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def _by_rows(shape: Sequence[int], like: Tensor) -> Tensor:
    """[B, H, M, D] in the memory order [B, M, H, D]."""
    return torch.empty_permuted(tuple(shape), (0, 2, 1, 3), dtype=like.dtype)
