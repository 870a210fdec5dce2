"""Decompositions for capture: the graph then has few kinds of ops, and each of them can be sharded exactly.

Beyond those of core ATen, means become sums divided by a literal count, statistics become sums, and biases become
additions. Attention, embeddings with their gradients, layer norms and dropout are not decomposed: they have rules of
their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from types import EllipsisType
from typing import Any, cast

import torch
from torch import Tensor

from moaic.capture.determinants import DECOMPOSITIONS as DETERMINANTS
from moaic.capture.foreach import per_tensor
from moaic.device.recurrent_cells import KERNELS as RECURRENT
from moaic.device.sparse_gradients import bag_is_sparse, dense_bag
from moaic.device.torch_private import overload_of

aten = torch.ops.aten

Table = dict[Any, Callable[..., Any]]


@cache
def decompositions() -> Table:
    """The decompositions for AOTAutograd."""
    from torch._decomp import core_aten_decompositions, get_decompositions  # pyright: ignore[reportUnknownVariableType]

    table: Table = dict(core_aten_decompositions())
    # Core ATen's attention for CPUs hands attention weights to a backward that expects logsumexp: wrong gradients.
    for kept in (aten._scaled_dot_product_flash_attention_for_cpu.default, aten.embedding_dense_backward.default):
        table.pop(kept, None)
    table.update(cast("Table", get_decompositions(_BY_PYTORCH)))
    table.update(per_tensor())
    table.update((overload_of(name), cell) for name, cell in RECURRENT.items())
    table.update(DETERMINANTS)
    table.update(_OURS)
    table.update((product, _of_one_type(product, table[product])) for product in _PROMOTED)
    table.update((gradient, _of_any_elements(table[gradient])) for gradient in _BY_NUMBER)
    return table


_BY_PYTORCH = [
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
    aten._native_batch_norm_legit_no_training,
    aten._batch_norm_with_update_functional,
    aten.batch_norm_backward,
    aten.native_batch_norm,
    aten.native_group_norm,
    aten.linalg_vector_norm,
    aten.mv,
    aten.dot,
    aten.addmv,
    aten.addr,
    aten.rrelu_with_noise_backward,
]
"""Ops that PyTorch can decompose but core ATen does not."""


_PROMOTED = (aten.addmm.default, aten.mv.default)
"""Products that decompose into ops that promote operands of several types, which the kernels of the products refuse."""


def _of_one_type(product: Any, decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """The decomposition of a product whose operands must have one type."""

    def decompose(*operands: Tensor, **settings: Any) -> Any:
        dtypes = [operand.dtype for operand in operands]
        if len(set(dtypes)) > 1:
            raise RuntimeError(f"{product}: operands must have the same dtype, but got {', '.join(map(str, dtypes))}")
        return decomposition(*operands, **settings)

    return decompose


_BY_NUMBER = (aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default)
"""Gradients of means whose decompositions divide by the number of elements."""


def _of_any_elements(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """The decomposition of a gradient that may have no elements."""

    def decompose(grad: Tensor, x: Tensor, *rest: Any) -> Any:
        return decomposition(grad, x, *rest) if x.numel() else torch.empty_like(x)

    return decompose


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    return tensor if factor == 1 else tensor * factor


def _addmm(bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _scaled(aten.mm(left, right), alpha) + _scaled(bias, beta)


def _add(left: Tensor, right: Tensor, *, alpha: float = 1) -> Tensor:
    """Without its factor, which Inductor loses when it joins the sum with a product (2.13)."""
    dtype = torch.result_type(left, right)
    if alpha == 1 or dtype == torch.bool:
        return NotImplemented
    wide = _wide(dtype)
    return (left.to(wide) + right.to(wide) * alpha).to(dtype)


def _baddbmm(bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = _scaled(aten.bmm(left, right), alpha)
    return product if beta == 0 else product + _scaled(bias, beta)


def _mean(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return _mean_dim(x, None, dtype=dtype)


def _mean_dim(
    x: Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    dims = _dims(x, dim)
    count = prod(x.shape[d] for d in dims)
    wide = _wide(dtype or x.dtype)
    mean = aten.sum.dim_IntList(x, list(dims), keepdim, dtype=wide) / count
    return mean.to(dtype or x.dtype)


def _dims(x: Tensor, dim: Sequence[int] | int | None) -> tuple[int, ...]:
    if dim is None or dim == []:
        return tuple(range(x.dim()))
    return tuple(d % x.dim() for d in ([dim] if isinstance(dim, int) else dim)) if x.dim() else ()


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which a sum accumulates: float32 for 16-bit floats, as in PyTorch's own reductions."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _var_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    dims = _dims(x, dim)
    count = prod(x.shape[d] for d in dims)
    wide = x.to(_wide(x.dtype))
    mean = aten.sum.dim_IntList(wide, list(dims), True) / count
    centered = wide - mean
    total = aten.sum.dim_IntList(centered * centered, list(dims), keepdim)
    divisor = count - (1 if correction is None else correction)
    return (total / divisor).to(x.dtype), (mean if keepdim else _without(mean, dims)).to(x.dtype)


def _without(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return aten.view(x, [size for d, size in enumerate(x.shape) if d not in dims])


def _var(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    return _var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Any:
    if bias is None:
        return NotImplemented
    spatial = [1] * (weight.dim() - 2)
    return aten.convolution(x, weight, None, *rest) + aten.view(bias, [-1, *spatial])


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Sequence[int] | None, *rest: Any) -> Any:
    *geometry, mask = rest
    if not mask[2]:
        return NotImplemented
    others = [i for i in range(grad.dim()) if i != 1]
    grad_x, grad_weight = None, None
    if mask[0] or mask[1]:
        grads = aten.convolution_backward(grad, x, weight, None, *geometry, [mask[0], mask[1], False])
        grad_x, grad_weight = grads[0], grads[1]
    return grad_x, grad_weight, aten.sum.dim_IntList(grad, others)


def _repeat(x: Tensor, repeats: Sequence[int]) -> Tensor:
    lead = len(repeats) - x.dim()
    shape = [1] * lead + list(x.shape)
    spread = [part for size in shape for part in (1, size)]
    wide = [part for times, size in zip(repeats, shape, strict=True) for part in (times, size)]
    whole = [times * size for times, size in zip(repeats, shape, strict=True)]
    return aten.expand(aten.view(x, spread), wide).reshape(whole).contiguous()


def _index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    before: list[Tensor | EllipsisType | None] = [None] * (dim % x.dim() if x.dim() else 0)
    if x.dim() == 0:
        return NotImplemented
    return aten.index.Tensor(x, [*before, index.reshape(-1)])


def _slice_backward(grad: Tensor, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Any:
    """Pad the gradient with zeros, between its elements too for a strided slice, instead of writing into zeros."""
    dim %= grad.dim()
    size = sizes[dim]
    start, end = (min(max(at + size if at < 0 else at, 0), size) for at in (start, end))
    after = [0, 0] * (grad.dim() - 1 - dim)
    if step == 1:
        return aten.constant_pad_nd(grad, [*after, start, size - max(start, end)])
    count, offset = grad.shape[dim], start % step
    apart = aten.constant_pad_nd(aten.unsqueeze(grad, dim + 1), [*after, offset, step - 1 - offset])
    spread = aten.view(apart, [*sizes[:dim], count * step, *sizes[dim + 1 :]])
    first = start - offset
    return aten.constant_pad_nd(spread, [*after, first, size - first - count * step])


def _unfold(x: Tensor, dim: int, size: int, step: int) -> Tensor:
    """Windows as an index op; by `step` they may overlap or leave elements out."""
    if x.dim() == 0:
        return NotImplemented
    dim %= x.dim()
    count = (x.shape[dim] - size) // step + 1
    first = aten.arange.start_step(0, count * step, step, device=x.device)
    places = aten.unsqueeze(first, 1) + aten.arange(size, device=x.device)
    before: list[Tensor | None] = [None] * dim
    windows = aten.index.Tensor(x, [*before, places])
    order = [at for at in range(x.dim() + 1) if at != dim + 1]
    return aten.permute(windows, [*order, dim + 1])


def _masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Index the source by the rank of each true element among the true ones, which the mask alone determines."""
    shape: list[int] = list(cast("Any", torch.broadcast_shapes)(x.shape, mask.shape))
    if not source.numel():
        return x.expand(shape).clone()
    wide = mask.expand(shape)
    found: Tensor = aten.index.Tensor(source.reshape(-1), [_counted(wide)])
    return aten.where.self(wide, found.view(shape), x)


def _masked_scatter_backward(grad: Tensor, mask: Tensor, sizes: Sequence[int]) -> Tensor:
    mask = mask.expand(grad.shape)
    given = aten.where.self(mask, grad, grad.new_zeros(())).reshape(-1)
    gathered = aten.index_put.default(grad.new_zeros([prod(sizes)]), [_counted(mask)], given, True)
    return aten.view(gathered, sizes)


def _counted(mask: Tensor) -> Tensor:
    """The number of true elements before each true element; the value at false ones is not used."""
    count = aten.cumsum(mask.reshape(-1).to(torch.int64), 0)
    return aten.clamp_min(count - 1, 0)


def _select_backward(grad: Tensor, sizes: Sequence[int], dim: int, index: int) -> Tensor:
    dim, index = dim % len(sizes), index % sizes[dim]
    after = [0, 0] * (len(sizes) - 1 - dim)
    return aten.constant_pad_nd(aten.unsqueeze(grad, dim), [*after, index, sizes[dim] - 1 - index])


def _extreme(name: str) -> Callable[[Tensor], Tensor]:
    """The maximum or minimum of all elements as a reduction over dims, which can be taken part by part."""

    def find(x: Tensor) -> Tensor:
        return getattr(aten, name)(x, list(range(x.dim())))

    return find


def _silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """With the sigmoid as one op, which patterns of kernels match: PyTorch 2.11 would decompose it into four."""
    wide_grad, wide = grad.to(_wide(grad.dtype)), x.to(_wide(x.dtype))
    share = aten.sigmoid(wide)
    return (wide_grad * share * (1 + wide * (1 - share))).to(x.dtype)


def _zeros(
    size: Sequence[int], *, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: Any
) -> Any:
    """Zeros with storage: autograd's zero tensors have none, and other ops do not take them."""
    return aten.full(size, 0, dtype=dtype or torch.get_default_dtype(), device=device)


def _randperm(n: int, *, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: Any) -> Tensor:
    """Sort by two random keys: elements that tie in one are in the order of the other."""
    once, again = (aten.sort.stable(aten.rand([n], device=device), stable=True)[1] for _ in range(2))
    return aten.index.Tensor(once, [again]).to(dtype or torch.int64)


def _rrelu(
    x: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, _: Any = None
) -> tuple[Tensor, Tensor]:
    """Draw factors where `x` is not positive; the backward gets them as `noise`."""
    if not training:
        return aten.leaky_relu(x, (lower + upper) / 2), noise
    drawn = aten.uniform(x, lower, upper)
    factors = torch.where(x <= 0, drawn, torch.ones_like(x))
    return x * factors, factors


def _embedding_bag_backward(*args: Any) -> Any:
    return dense_bag(aten._embedding_bag_backward.default)(*args) if bag_is_sparse(args) else NotImplemented


_OURS: Table = {
    aten._embedding_bag_backward.default: _embedding_bag_backward,
    aten.randperm.default: _randperm,
    aten.rrelu_with_noise_functional.default: _rrelu,
    aten._efficientzerotensor.default: _zeros,
    aten.slice_backward.default: _slice_backward,
    aten.select_backward.default: _select_backward,
    aten.unfold.default: _unfold,
    aten.masked_scatter.default: _masked_scatter,
    aten.masked_scatter_backward.default: _masked_scatter_backward,
    aten.add.Tensor: _add,
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _baddbmm,
    aten.mean.default: _mean,
    aten.mean.dim: _mean_dim,
    aten.max.default: _extreme("amax"),
    aten.min.default: _extreme("amin"),
    aten.var_mean.correction: _var_mean,
    aten.var.correction: _var,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.repeat.default: _repeat,
    aten.index_select.default: _index_select,
    aten.silu_backward.default: _silu_backward,
}
