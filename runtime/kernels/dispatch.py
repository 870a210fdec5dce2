"""The choice between a kernel of moaic and plain PyTorch or Inductor, by the measured gains.

All callers of kernels ask this module. It imports patterns and Triton only for a GPU on which a kernel has a gain.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from moaic.ir.graph import Function
from moaic.runtime.dtypes import DTYPE_NAMES, DTYPES
from moaic.runtime.host.worker_kinds import takes_all_kernels
from moaic.runtime.kernels import triton_launch
from moaic.runtime.kernels.gains import GAINS, Gains, KernelShape, Wins, winning_in_functions, worth_using
from moaic.runtime.kernels.tiles import tile_of
from moaic.runtime.kernels.triton_launch import ELEMENTS, Tile, target_of


def measured_on(target: str, gains: Gains = GAINS) -> Wins:
    """The choice on one GPU. Gains are measured on 16-bit elements and apply to these alone.

    With MOAI_KERNELS=all every kernel wins.
    """
    takes_all = takes_all_kernels(os.environ)

    def wins(kernel: str, shape: KernelShape, element: str) -> bool:
        dtype = DTYPES[element]
        is_known = dtype.itemsize == torch.bfloat16.itemsize and worth_using(kernel, target, shape, gains)
        return (is_known or (takes_all and dtype in ELEMENTS)) and tile_of(kernel, target, shape) is not None

    return wins


def with_measured_kernels(function: Function, target: str, gains: Gains = GAINS) -> Function:
    """`function`, of local types, with the kernels that were measured to win on this GPU."""
    takes_all = takes_all_kernels(os.environ)
    names = winning_in_functions(target, gains)
    if not names and not takes_all:
        return function
    from moaic.runtime.kernels.patterns.rewrite import RULES, with_kernels

    return with_kernels(function, measured_on(target, gains), RULES if takes_all else names)


def tile_where_it_wins(kernel: str, tensor: Tensor, shape: Sequence[int] | None = None) -> Tile | None:
    """The tile of a kernel between compiled functions; None if it was not measured to win on the tensor's device.

    `shape` is the shape to look up in the table of gains, if it is not the tensor's.
    """
    if not triton_launch.runs_kernels(tensor.device):
        return None
    target = target_of(tensor.device)
    shape = tuple(tensor.shape if shape is None else shape)
    wins = measured_on(target)(kernel, shape, DTYPE_NAMES[tensor.dtype])
    return tile_of(kernel, target, shape) if wins else None
