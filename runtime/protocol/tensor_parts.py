"""Parts of a tensor along a sub-axis of a dim: `cut` takes one, `join` is the inverse.

A dim of size N = outer * count * stride is cut along its middle factor: part i has the indices with
(index // stride) % count == i. Layouts order their splits by falling stride, so a cut does not change the strides of
the splits after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from moaic.ir.layout import Layout, Mesh, Split


def cut(tensor: Tensor, dim: int, stride: int, count: int, index: int) -> Tensor:
    """Part `index` of `count` along the sub-axis of `dim` with this stride; a view if possible."""
    outer = tensor.shape[dim] // (count * stride)
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


def local_part(whole: Tensor, mesh: Mesh, layout: Layout, rank: int) -> Tensor:
    """The part of `whole` that `rank` holds by the splits of `layout`."""
    coordinates = mesh.coordinates(rank)
    for split in layout.splits:
        whole = cut(whole, split.dim, split.stride, mesh.size(split.axis), coordinates[split.axis])
    return whole


def assemble(part: Callable[[int], Tensor], mesh: Mesh, layout: Layout) -> Tensor:
    """The global tensor from the parts of its owner ranks, at coordinate 0 of every axis that does not shard it."""

    def gather(splits: Sequence[Split], coordinates: Mapping[str, int]) -> Tensor:
        if not splits:
            return part(mesh.rank(dict(coordinates)))
        first, *rest = splits
        parts = [gather(rest, {**coordinates, first.axis: i}) for i in range(mesh.size(first.axis))]
        return join(parts, first.dim, first.stride)

    return gather(layout.splits, dict(layout.owner))
