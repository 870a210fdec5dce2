"""Cases of look-ups and writes by index."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from moaic.ir.graph import Attr
from tests.ir.op_cases.drawing import Case, Cases, Drawn, Shape, case

cases = Cases()


def indexed_shape(d: Drawn, shape: Shape, dim: int) -> Shape:
    """An index over `dim` of a tensor of `shape`: other dims are as long, or shorter."""
    sizes = [size if d.pick(True, True, False) else d.number(1, size) for size in shape]
    sizes[dim] = d.number(1, shape[dim])
    return tuple(sizes)


@cases("gather")
def gather(d: Drawn, name: str) -> Case:
    shape = d.shape(1)
    dim = d.dim(len(shape))
    index = d.ints(*indexed_shape(d, shape, dim), low=0, high=shape[dim])
    return case(name, d.real(*shape), index, dim=dim)


@cases("scatter.value scatter.src scatter_add")
def scatter(d: Drawn, name: str) -> Case:
    """Indices along the dim are distinct: what wins among equal ones is not defined."""
    shape = d.shape(1)
    dim = d.dim(len(shape))
    sizes = indexed_shape(d, shape, dim)
    order = torch.rand(*sizes[: dim % len(shape)], shape[dim], *sizes[dim % len(shape) + 1 :], generator=d.random)
    index = order.argsort(dim).narrow(dim, 0, sizes[dim]).contiguous()
    if name == "aten.scatter.value":
        return case(name, d.real(*shape), index, dim=dim, value=-1.0)
    source = tuple(size if d.pick(True, True, False) else size + 1 for size in sizes)
    return case(name, d.real(*shape), index, d.real(*source), dim=dim)


def index_operands(d: Drawn, shape: Shape) -> tuple[list[Tensor | None], Shape]:
    """Index tensors for some dims of `shape`, and the shape that they have together."""
    chosen = d.draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, max_size=len(shape), unique=True))
    together = d.shape(0, 2)
    shapes = {at: together if at == min(chosen) else d.narrower(together) for at in chosen}
    indices = [
        d.ints(*shapes[at], low=-size if d.pick(False, True) else 0, high=size) if at in chosen else None
        for at, size in enumerate(shape[: max(chosen) + 1])
    ]
    return indices, together


@cases("index.Tensor")
def index(d: Drawn, name: str) -> Case:
    shape = d.shape(1)
    if d.pick(False, False, False, True):
        return case(name, d.real(*shape), [d.bools(shape[0])])
    return case(name, d.real(*shape), index_operands(d, shape)[0])


@cases("index_put")
def index_put(d: Drawn, name: str) -> Case:
    shape = d.shape(1)
    accumulate: dict[str, Attr] = {"accumulate": True} if d.pick(False, True) else {}
    base, (indices, _) = d.real(*shape), index_operands(d, shape)
    values = torch.ops.aten.index.Tensor(base, indices)
    # Without accumulation equal indices must be given equal values: one number for all.
    filling = d.real(*d.narrower(tuple(values.shape))) if accumulate else torch.full_like(values, 1.5)
    return case(name, base, indices, filling, **accumulate)


@cases("embedding")
def embedding(d: Drawn, name: str) -> Case:
    rows = d.size()
    padding: dict[str, Attr] = {"padding_idx": 0} if d.pick(False, True) else {}
    return case(name, d.real(rows, d.size()), d.ints(*d.shape(), low=0, high=rows), **padding)


@cases("embedding_dense_backward")
def embedding_dense_backward(d: Drawn, name: str) -> Case:
    rows, shape = d.size(), d.shape()
    ids = d.ints(*shape, low=0, high=rows)
    attrs: dict[str, Attr] = {"padding_idx": d.pick(-1, 0), "scale_grad_by_freq": d.pick(False, False, True)}
    return case(name, d.real(*shape, d.size()), ids, num_weights=rows, **attrs)
