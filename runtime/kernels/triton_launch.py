"""Common parts of kernels: tile sizes, the launch, and the description by which a kernel is compiled ahead of time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

ELEMENTS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Element types of the kernels, with Triton's names for them; all arithmetic is in float32."""


LAUNCH_SETTINGS: Final[Mapping[str, Any]] = {"enable_fp_fusion": True, "num_stages": 1}
"""Fused multiply-add, so that results do not depend on the default of Triton's version; no software pipelining, as no
kernel multiplies matrices."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The block that one program of a kernel works on at a time. Sizes are powers of two, except `programs`."""

    rows: int = 1
    columns: int = 1
    warps: int = 4
    programs: int = 1
    """Number of programs that share a reduction; their partial sums are added in order."""


@dataclass(frozen=True, slots=True)
class TritonProgram:
    """A Triton function with a type or a constant for each parameter."""

    function: Any
    types: Mapping[str, str]
    """Type by parameter, in Triton's words: `*bf16`, `i32`."""
    constants: Mapping[str, Any]


def runs_kernels(device: torch.device) -> bool:
    """Whether Triton kernels run on tensors of this device; also true of a host that emulates a GPU."""
    return device.type == "cuda"


def target_of(device: torch.device) -> str:
    """The name that the tables have for a GPU of this host: `sm_90`, `gfx942`."""
    if torch.version.hip:
        properties: Any = torch.cuda.get_device_properties(device)
        return str(properties.gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def launch(function: Any, grid: tuple[int, ...], tile: Tile, *operands: Any, **constants: Any) -> None:
    """Launch a kernel; does nothing for an empty grid."""
    if prod(grid):
        function[grid](*operands, **constants, num_warps=tile.warps, **LAUNCH_SETTINGS)


def blocks(count: int, size: int) -> int:
    """The number of blocks of this size that cover the count."""
    return -(-count // size)


def rows_of(x: Tensor) -> Tensor:
    """`[..., n]` as `[rows, n]` with contiguous rows: a view if strides allow it, else a copy."""
    flat = x.reshape(prod(x.shape[:-1]), x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()
