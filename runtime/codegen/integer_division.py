"""Quotients of integers in Inductor's kernels for CPUs, which end the process at a zero before PyTorch 2.13."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch

aten: Final[Any] = torch.ops.aten

QUOTIENTS: Final = (
    aten.div.Tensor_mode,
    aten.div.Scalar_mode,
    aten.fmod.Tensor,
    aten.fmod.Scalar,
    aten.remainder.Tensor,
    aten.remainder.Scalar,
    aten.remainder.Scalar_Tensor,
)

PREFIX: Final = Path(torch.__file__).parent / "include" / "torch" / "csrc" / "inductor" / "cpp_prefix.h"
"""What Inductor's kernels for CPUs begin with; where they check divisors, it has the words of the error."""


@cache
def cache_tag() -> str:
    """Keeps kernels from before `check_divisors` from being found in Inductor's cache; empty where it does nothing."""
    return "" if "ZeroDivisionError" in PREFIX.read_text(encoding="utf-8") else "-divisors"


@cache
def check_divisors() -> None:
    """Have Inductor call PyTorch's op for a quotient of integers, if its own kernels do not check divisors."""
    if not cache_tag():
        return
    lowering: Any = import_module("torch._inductor.lowering")
    for op in QUOTIENTS:
        lowering.lowerings[op] = _checked(lowering, op)


def _checked(lowering: Any, op: Any) -> Callable[..., Any]:
    plain, by_op = lowering.lowerings[op], lowering.fallback_handler(op)

    def lower(a: Any, b: Any, **named: Any) -> Any:
        operands: list[Any] = [a, b]
        is_safe = isinstance(b, int | float) and b != 0
        is_integer = all(lowering.is_integer_type(each) for each in operands)
        is_on_cpu = any(each.get_device().type == "cpu" for each in operands if hasattr(each, "get_device"))
        return by_op(a, b, **named) if is_integer and is_on_cpu and not is_safe else plain(a, b, **named)

    return lower
