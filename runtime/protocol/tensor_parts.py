"""Parts of a tensor along a sub-axis of a dim: `cut` takes one, `join` is the inverse.

A dim of size N = outer * count * stride is cut along its middle factor: part i has the indices with
(index // stride) % count == i. Layouts order their splits by falling stride, so a cut does not change the strides of
the splits after it. Where N is smaller than count * stride, the last part is padded with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from moaic.ir.layout import Layout, Mesh, Split, elements_of


def cut(tensor: Tensor, dim: int, stride: int, count: int, index: int) -> Tensor:
    """Part `index` of `count` along the sub-axis of `dim` with this stride; a view if possible."""
    outer = tensor.shape[dim] // (count * stride)
    if outer == 0 < tensor.shape[dim]:
        size = tensor.shape[dim]
        part = tensor.narrow(dim, min(size, index * stride), elements_of(size, stride, index))
        return padded(part, dim, stride)
    if outer == 1:
        return tensor.narrow(dim, index * stride, stride)
    return _unflatten(tensor, dim, (outer, count, stride)).select(dim + 1, index).flatten(dim, dim + 1)


def _unflatten(tensor: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
    return cast("Tensor", tensor.unflatten(dim, sizes))


def join(parts: Sequence[Tensor], dim: int, stride: int) -> Tensor:
    """The tensor with these parts along the sub-axis of `dim` with this stride: the inverse of `cut`."""
    outer = parts[0].shape[dim] // stride
    if outer == 1:
        return torch.cat(list(parts), dim)
    rows = [_unflatten(part, dim, (outer, stride)) for part in parts]
    return torch.stack(rows, dim + 1).flatten(dim, dim + 2)


def padded(tensor: Tensor, dim: int, size: int) -> Tensor:
    """The tensor with zeros after the elements of `dim`, up to this size; itself if it is as long."""
    missing = size - tensor.shape[dim]
    if missing <= 0:
        return tensor
    return torch.constant_pad_nd(tensor, (*[0, 0] * (tensor.dim() - 1 - dim), 0, missing))


def without_padding(tensor: Tensor, dim: int, size: int) -> Tensor:
    """The first elements of `dim`, up to this size, contiguous."""
    return tensor if tensor.shape[dim] <= size else tensor.narrow(dim, 0, size).contiguous()


def local_part(whole: Tensor, mesh: Mesh, layout: Layout, rank: int) -> Tensor:
    """The part of `whole` that `rank` holds by the splits of `layout`."""
    coordinates = mesh.coordinates(rank)
    for split in layout.splits:
        whole = cut(whole, split.dim, split.stride, mesh.size(split.axis), coordinates[split.axis])
    return whole


def assemble(part: Callable[[int], Tensor], shape: Sequence[int], mesh: Mesh, layout: Layout) -> Tensor:
    """The tensor of this global shape from the parts of its owners, at coordinate 0 of axes that do not shard it."""

    def gather(splits: Sequence[Split], coordinates: Mapping[str, int]) -> Tensor:
        if not splits:
            return part(mesh.rank(dict(coordinates)))
        first, *rest = splits
        parts = [gather(rest, {**coordinates, first.axis: i}) for i in range(mesh.size(first.axis))]
        return without_padding(join(parts, first.dim, first.stride), first.dim, shape[first.dim])

    return gather(layout.splits, dict(layout.owner))
