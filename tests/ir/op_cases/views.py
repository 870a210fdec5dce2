"""Cases of views: reshapes, permutations, broadcasts and slices."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from moaic.ir.graph import Attr
from tests.ir.op_cases.drawing import Case, Cases, Drawn, Shape, case

cases = Cases()


def regrouped(d: Drawn, sizes: Shape) -> Shape:
    """A shape with the elements of `sizes`, neighbors multiplied together and ones strewn in."""
    shape: list[int] = []
    for at, size in enumerate(sizes):
        if at and d.pick(False, True):
            shape[-1] *= size
        else:
            shape += [1] * d.pick(0, 0, 0, 1) + [size]
    return (*shape, *[1] * d.pick(0, 0, 0, 1))


@cases("view")
def view(d: Drawn, name: str) -> Case:
    sizes = tuple(d.pick(1, 2, 3, 4, 6) for _ in range(d.number(1, 4)))
    left = regrouped(d, sizes)
    right = regrouped(d, sizes if d.pick(True, True, False) else sizes[::-1])
    holed = [-1 if at == len(right) - 1 and d.pick(False, True) else size for at, size in enumerate(right)]
    return case(name, d.real(*left), size=tuple(holed))


@cases("permute")
def permute(d: Drawn, name: str) -> Case:
    shape = d.shape(0, 4)
    order = d.draw(st.permutations(range(len(shape))))
    return case(name, d.real(*shape), dims=tuple(at - len(shape) if d.pick(False, True) else at for at in order))


@cases("transpose.int")
def transpose(d: Drawn, name: str) -> Case:
    shape = d.shape()
    return case(name, d.real(*shape), dim0=d.dim(len(shape)), dim1=d.dim(len(shape)))


@cases("t")
def t(d: Drawn, name: str) -> Case:
    return case(name, d.real(*d.shape(0, 2)))


@cases("expand")
def expand(d: Drawn, name: str) -> Case:
    shape = d.shape(1)
    source = d.narrower(shape)
    lead = len(shape) - len(source)
    size = [-1 if at >= lead and source[at - lead] == n and d.pick(False, True) else n for at, n in enumerate(shape)]
    return case(name, d.real(*source), size=tuple(size))


@cases("view_as_complex view_as_real")
def complex_views(d: Drawn, name: str) -> Case:
    shape = d.shape()
    return case(name, d.real(*shape, 2) if name.endswith("complex") else d.complex(*shape))


@cases("unsqueeze")
def unsqueeze(d: Drawn, name: str) -> Case:
    shape = d.shape()
    return case(name, d.real(*shape), dim=d.number(-len(shape) - 1, len(shape)))


@cases("squeeze squeeze.dim squeeze.dims")
def squeeze(d: Drawn, name: str) -> Case:
    shape = tuple(d.pick(1, 1, 2, 3, 6) for _ in range(d.number(1, 4)))
    if name == "aten.squeeze":
        return case(name, d.real(*shape))
    dims = d.draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, max_size=2, unique=True))
    return case(name, d.real(*shape), dim=dims[0] if name == "aten.squeeze.dim" else tuple(dims))


@cases("slice.Tensor")
def slice_(d: Drawn, name: str) -> Case:
    shape = d.shape(1)
    dim = d.dim(len(shape))
    size = shape[dim]
    equal = [n for n in range(1, size + 1) if size % n == 0]
    length = d.pick(*equal)
    start = d.pick(*range(0, size, length)) if d.pick(True, True, False) else d.number(0, size - 1)
    ends = (min(start + length, size), size, 2**63 - 1)
    signed = start - size if d.pick(False, True) else start
    step: dict[str, Attr] = {"step": d.pick(2, 3)} if d.pick(False, False, True) else {}
    return case(name, d.real(*shape), dim=dim, start=signed, end=d.pick(*ends), **step)


def lengths(d: Drawn) -> list[int]:
    """Sizes of pieces, half of the time all equal."""
    count, size = d.number(1, 4), d.size()
    return [size] * count if d.pick(False, True) else [d.size() for _ in range(count)]


@cases("split_with_sizes")
def split_with_sizes(d: Drawn, name: str) -> Case:
    sizes, shape = lengths(d), list(d.shape(1))
    dim = d.dim(len(shape))
    shape[dim] = sum(sizes)
    return case(name, d.real(*shape), split_sizes=tuple(sizes), dim=dim)


@cases("split.Tensor")
def split(d: Drawn, name: str) -> Case:
    shape = d.shape(1)
    return case(name, d.real(*shape), split_size=d.pick(1, 2, 3, 4, 6), dim=d.dim(len(shape)))


@cases("select.int")
def select(d: Drawn, name: str) -> Case:
    shape = d.shape(1)
    dim = d.dim(len(shape))
    return case(name, d.real(*shape), dim=dim, index=d.number(-shape[dim], shape[dim] - 1))


@cases("diagonal diagonal_scatter")
def diagonal(d: Drawn, name: str) -> Case:
    shape = d.shape(2, 4)
    one, other = d.draw(st.permutations(range(len(shape))))[:2]
    attrs: dict[str, Attr] = {"offset": d.pick(0, 0, 1, -1), "dim1": one, "dim2": other - len(shape)}
    x = d.real(*shape)
    found = torch.ops.aten.diagonal.default(x, **attrs)
    return case(name, x, *([d.real(*found.shape)] if name.endswith("scatter") else []), **attrs)
