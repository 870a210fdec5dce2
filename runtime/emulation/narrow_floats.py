"""bfloat16 and eight-bit floats in Triton's interpreter, which has no type of NumPy for them and keeps their bits.

Triton 3.7 rounds to them towards zero where a GPU rounds to nearest, ties to even, and it adds and multiplies bfloat16
as the integers that their bits are. Here they are widened to float32, computed, and rounded once, as GPUs do it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor


def mend_narrow_floats(interpreter: Any, language: Any) -> None:
    """From now on, in this process."""
    _Narrow(interpreter, language).mend()


class _Narrow:
    """The interpreter's parts that handle such floats."""

    def __init__(self, interpreter: Any, language: Any) -> None:
        self._handle = interpreter.TensorHandle
        self._builder = interpreter.InterpreterBuilder
        self._array_type = interpreter._get_np_dtype
        self._wide = language.float32
        self._types: dict[Any, torch.dtype] = {
            language.bfloat16: torch.bfloat16,
            language.float8e4nv: torch.float8_e4m3fn,
            language.float8e5: torch.float8_e5m2,
            language.float8e4b8: torch.float8_e4m3fnuz,
            language.float8e5b16: torch.float8_e5m2fnuz,
        }

    def mend(self) -> None:
        builder = self._builder
        builder.cast_impl = self._cast(builder.cast_impl)
        builder.create_fp_to_fp = self._cast(builder.create_fp_to_fp)
        for name in ("binary_op", "unary_op", "ternary_op", "create_fma", "create_dot"):
            setattr(builder, name, self._widened(getattr(builder, name)))

    def _cast(self, cast: Callable[..., Any]) -> Callable[..., Any]:
        def run(builder: Any, source: Any, kind: Any, *rounding: Any) -> Any:
            if source.dtype.scalar not in self._types and kind.scalar not in self._types:
                return cast(builder, source, kind, *rounding)
            return self._rounded(self._tensor(source), kind.scalar)

        return run

    def _widened(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """`compute` on operands of float32; its result has the type that it had on narrow ones."""

        def run(builder: Any, *operands: Any) -> Any:
            kinds = [each.dtype.scalar for each in operands if isinstance(each, self._handle)]
            if not any(kind in self._types for kind in kinds):
                return compute(builder, *operands)
            result = compute(builder, *(self._widen(each) for each in operands))
            # Of a product of blocks the sum is wide by itself; what is compared or selected by it is not.
            last = kinds[-1]
            if result.data.dtype == bool or last not in self._types or result.dtype.scalar != self._wide:
                return result
            return self._rounded(torch.from_numpy(numpy.ascontiguousarray(result.data)), last)

        return run

    def _widen(self, operand: Any) -> Any:
        if not isinstance(operand, self._handle) or operand.dtype.scalar not in self._types:
            return operand
        return self._handle(self._tensor(operand).float().numpy(), self._wide)

    def _tensor(self, operand: Any) -> Tensor:
        held = torch.from_numpy(numpy.ascontiguousarray(operand.data))
        kind = self._types.get(operand.dtype.scalar)
        return held if kind is None else held.view(kind)

    def _rounded(self, wide: Tensor, kind: Any) -> Any:
        narrow = self._types.get(kind)
        if narrow is None:
            return self._handle(wide.float().numpy().astype(self._array_type(kind)), kind)
        if narrow.itemsize == 1:
            # Instructions of GPUs give the largest number for one that is out of range.
            limit = torch.finfo(narrow).max
            wide = wide.float().clamp(-limit, limit)
        bits = torch.uint16 if narrow.itemsize == 2 else torch.uint8
        return self._handle(wide.to(narrow).view(bits).numpy(), kind)
