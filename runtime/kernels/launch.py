"""What every kernel shares: how it is cut, how it is started, and what it is compiled from where nothing starts it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

ELEMENTS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Types that the kernels take, with Triton's names for them; arithmetic is in float32 throughout."""


FUSED: Final[Mapping[str, Any]] = {"enable_fp_fusion": True}
"""A product and the sum that it goes into round once, whatever the version of Triton does unasked."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program of a kernel works on at a time. Powers of two, but for `programs`."""

    rows: int = 1
    columns: int = 1
    inner: int = 1
    """Of the dim that a matrix product sums over."""
    warps: int = 4
    stages: int = 1
    """Loads in flight ahead of the arithmetic."""
    programs: int = 1
    """Among which a kernel divides what each of its results depends on; their parts are then added in order."""


@dataclass(frozen=True, slots=True)
class TritonProgram:
    """A Triton function with the types and constants of one launch; what is not a constant has a type."""

    function: Any
    types: Mapping[str, str]
    """By parameter, in Triton's words: `*bf16`, `i32`."""
    constants: Mapping[str, Any]


def target_of(device: torch.device) -> str:
    """The name of a GPU of this host in the tables: `sm_90`, `gfx942`."""
    if torch.version.hip:
        properties: Any = torch.cuda.get_device_properties(device)
        return str(properties.gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def launch(function: Any, grid: tuple[int, ...], tile: Tile, *operands: Any, **constants: Any) -> None:
    """Starts one program for each point of the grid; none for an empty one."""
    if prod(grid):
        function[grid](*operands, **constants, num_warps=tile.warps, num_stages=tile.stages, **FUSED)


def blocks(count: int, size: int) -> int:
    """How many of this size cover the count."""
    return -(-count // size)


def rows_of(x: Tensor) -> Tensor:
    """`[..., n]` as `[rows, n]` whose rows lie whole in memory: a view where strides allow it, else a copy."""
    flat = x.reshape(prod(x.shape[:-1]), x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()
