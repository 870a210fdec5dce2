"""Cases of pooling, gradients of padding, and sampling at points."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moaic.ir.graph import Attr
from tests.ir.op_cases.drawing import Case, Cases, Drawn, case

cases = Cases()


def spatial(name: str) -> int:
    """How many dims a window has, by the name of its op."""
    return next(dims for dims in (1, 2, 3) if f"{dims}d" in name)


def aten(name: str) -> Callable[..., Any]:
    return getattr(torch.ops.aten, name.removeprefix("aten."))


def images(d: Drawn, dims: int = 2) -> Tensor:
    lead = tuple(d.pick(1, 2, 3, 4, 6) for _ in range(d.number(1, 2)))
    return d.fine(*lead, *(d.number(2, 6 if dims < 3 else 4) for _ in range(dims)))


def windows(d: Drawn, dims: int) -> dict[str, Attr]:
    rest = dims - 1
    return {
        "kernel_size": (2,) * dims,
        "stride": (d.pick(1, 2), *[1] * rest),
        "padding": (d.pick(0, 1), *[0] * rest),
    }


@cases("max_pool2d_with_indices avg_pool2d max_pool3d_with_indices avg_pool3d")
def pool(d: Drawn, name: str) -> Case:
    dims = spatial(name)
    return case(name, images(d, dims), **windows(d, dims))


@cases("max_pool2d_with_indices_backward max_pool3d_with_indices_backward")
def max_pool_backward(d: Drawn, name: str) -> Case:
    dims = spatial(name)
    x, attrs = images(d, dims), {**windows(d, dims), "dilation": (1,) * dims, "ceil_mode": False}
    out, indices = aten(name.removesuffix("_backward"))(x, *attrs.values())
    given = (d.fine(*out.shape), x)
    return case(name, *given, indices, **attrs)


@cases("avg_pool2d_backward avg_pool3d_backward")
def avg_pool_backward(d: Drawn, name: str) -> Case:
    dims = spatial(name)
    x, window = images(d, dims), windows(d, dims)
    grad = d.fine(*aten(name.removesuffix("_backward"))(x, *window.values()).shape)
    rest: dict[str, Attr] = {"ceil_mode": False, "count_include_pad": d.pick(False, True), "divisor_override": None}
    return case(name, grad, x, **window, **rest)


@cases("_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d")
def adaptive_pool(d: Drawn, name: str) -> Case:
    dims = spatial(name)
    return case(name, images(d, dims), output_size=tuple(d.pick(1, 2) for _ in range(dims)))


@cases("_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward")
def adaptive_pool_backward(d: Drawn, name: str) -> Case:
    dims = spatial(name)
    x = images(d, dims)
    return case(name, d.fine(*x.shape[:-dims], *(d.pick(1, 2) for _ in range(dims))), x)


@cases("adaptive_max_pool2d_backward adaptive_max_pool3d_backward")
def adaptive_max_backward(d: Drawn, name: str) -> Case:
    dims = spatial(name)
    x = images(d, dims)
    out, indices = aten(name.removesuffix("_backward"))(x, [d.pick(1, 2) for _ in range(dims)])
    return case(name, d.fine(*out.shape), x, indices)


@cases(" ".join(f"{how}_pad{dims}d_backward" for how in ("replication", "reflection") for dims in (1, 2, 3)))
def padded_backward(d: Drawn, name: str) -> Case:
    dims = spatial(name)
    x = images(d, dims)
    padding = tuple(d.number(0, 1) for _ in range(2 * dims))
    out = aten(name.removesuffix("_backward"))(x, padding)
    return case(name, d.fine(*out.shape), x, padding=padding)


def sampled(d: Drawn, name: str) -> tuple[Tensor, Tensor, dict[str, Attr]]:
    """A picture, places in it, of which some lie outside, and how to read between pixels."""
    dims = spatial(name)
    batch, channels = d.pick(1, 2, 4), d.pick(1, 2, 3)
    picture = d.fine(batch, channels, *(d.number(2, 4) for _ in range(dims)))
    places = d.fine(batch, *(d.pick(1, 2, 4) for _ in range(dims)), dims)
    attrs: dict[str, Attr] = {
        "interpolation_mode": d.pick(0, 1),
        "padding_mode": d.pick(0, 1, 2),
        "align_corners": d.pick(False, True),
    }
    return picture, places, attrs


@cases("grid_sampler_2d grid_sampler_3d")
def sample(d: Drawn, name: str) -> Case:
    picture, places, attrs = sampled(d, name)
    return case(name, picture, places, **attrs)


@cases("grid_sampler_2d_backward grid_sampler_3d_backward")
def sample_backward(d: Drawn, name: str) -> Case:
    picture, places, attrs = sampled(d, name)
    grad = d.fine(*picture.shape[:2], *places.shape[1:-1])
    return case(name, grad, picture, places, **attrs, output_mask=d.pick((True, True), (False, True), (True, False)))
