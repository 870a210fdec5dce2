"""Inputs for a function that is run from the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Function, Module
from moaic.ir.ops import OPS

if TYPE_CHECKING:
    from torch import Tensor


def check_runnable(module: Module) -> None:
    """Raises Diagnostic for an op that neither moaic nor torch defines."""
    from moaic.runtime.protocol.aten_schema import signature

    for function in module.functions:
        for op in function.ops:
            if op.name not in OPS:
                try:
                    signature(op.name)
                except LookupError as error:
                    raise Diagnostic(str(error).replace(op.name, f"`{op.name}`")) from None


def random_inputs(function: Function, seed: int) -> list[Tensor]:
    """A tensor for each parameter of `function`, drawn by its role.

    Whole numbers are 0 and 1, which are valid indices of every dim with more than one element. Buffers are not
    negative, as variances are among them. Weights are scaled by the square root of their last dim.
    """
    import torch

    from moaic.runtime.dtypes import DTYPES

    generator = torch.Generator().manual_seed(seed)
    inputs: list[Tensor] = []
    for index, value in enumerate(function.params):
        dtype, shape, kind = DTYPES[value.type.dtype], value.type.shape, function.param_role(index).kind
        if kind == "key":
            inputs.append(torch.randint(0, 2**31, shape, generator=generator, dtype=dtype))
        elif not dtype.is_floating_point:
            inputs.append(torch.randint(0, 2, shape, generator=generator).to(dtype))
        elif kind == "buffer":
            inputs.append(torch.rand(shape, generator=generator).to(dtype))
        else:
            scale = shape[-1] ** -0.5 if kind == "param" and len(shape) > 1 else 1.0
            inputs.append((torch.randn(shape, generator=generator) * scale).to(dtype))
    return inputs
