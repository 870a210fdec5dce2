"""Products of 16-bit floats on CPUs without instructions for them: in float32, rounded once.

PyTorch's own kernels take far longer there than those of float32: on a Zen 4 core a product of float16 matrices of 256
rows takes 31 times as long, of 1,024 rows 107 times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from moaic.runtime.codegen.memory_order import ordered

PRODUCTS: Final = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution", "convolution_backward"}
)
"""Packets of aten."""


@cache
def lacking() -> frozenset[torch.dtype]:
    """The types of 16-bit floats for which this CPU has no instructions."""
    mkldnn: Any = torch.ops.mkldnn
    has = {
        torch.float16: mkldnn._is_mkldnn_fp16_supported,
        torch.bfloat16: mkldnn._is_mkldnn_bf16_supported,
    }
    return frozenset(dtype for dtype, is_supported in has.items() if not is_supported())


def widened(overload: Any) -> Callable[..., Any]:
    """An aten op as it is called on a CPU: products of types that the CPU lacks are computed in float32."""
    call = ordered(overload)
    return _in_float32(call) if overload.overloadpacket.__name__ in PRODUCTS and lacking() else call


def _in_float32(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        narrow = _lacked(args)
        if narrow is None or kwargs.get("out") is not None:
            return call(*args, **kwargs)
        made = call(*_wide(args), **kwargs)
        return (
            made.to(narrow)
            if isinstance(made, Tensor)
            else tuple(None if each is None else each.to(narrow) for each in made)
        )

    return run


def wide_operands(operands: Sequence[Any]) -> list[Any] | None:
    """The operands in float32, if their type is one that this CPU lacks; else None."""
    return None if _lacked(operands) is None else list(_wide(operands))


def _lacked(operands: Sequence[Any]) -> torch.dtype | None:
    """The type of the operands that are floats, if this CPU lacks it; PyTorch itself refuses floats of two types."""
    dtypes = {each.dtype for each in operands if isinstance(each, Tensor)}
    if dtypes.isdisjoint(lacking()):
        return None
    floats = [dtype for dtype in dtypes if dtype.is_floating_point]
    return floats[0] if len(floats) == 1 else None


def _wide(args: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(arg.float() if isinstance(arg, Tensor) and arg.dtype in lacking() else arg for arg in args)
