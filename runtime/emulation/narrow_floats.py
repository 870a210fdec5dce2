"""bfloat16 and eight-bit floats in Triton's interpreter, which has no type of NumPy for them and keeps their bits.

Triton 3.7 rounds to them towards zero where a GPU rounds to nearest, ties to even, and it adds and multiplies bfloat16
as the integers that their bits are. Here they are widened to float32, computed, and rounded once, as GPUs do it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor


class NarrowFloats:
    """The interpreter's parts that handle such floats."""

    def __init__(self, interpreter: Any, language: Any) -> None:
        self._handle = interpreter.TensorHandle
        self._reductions = (interpreter.ReduceOps, interpreter.ScanOps)
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
        """From now on, in this process."""
        builder = self._builder
        for kind in self._reductions:
            kind.apply_impl = self._reduced(kind.apply_impl)
        builder.cast_impl = self._cast(builder.cast_impl)
        builder.create_fp_to_fp = self._cast(builder.create_fp_to_fp)
        for name in ("binary_op", "unary_op", "ternary_op", "create_fma", "create_dot"):
            setattr(builder, name, self._widened(getattr(builder, name)))

    def holds(self, operand: Any) -> bool:
        """Whether an operand has such elements."""
        return operand.dtype.scalar in self._types

    def update(self, ptr: Any, value: Any, mask: Any, op: str) -> Any:
        """An atomic addition, one element after the other; the values that were there before."""
        if not op.endswith("FADD"):
            raise NotImplementedError(f"{op} of {value.dtype} is not known to the emulation")
        addresses = numpy.ascontiguousarray(ptr.data)
        terms, wanted = (numpy.broadcast_to(each.data, addresses.shape) for each in (value, mask))
        before = numpy.zeros(addresses.shape, self._array_type(value.dtype.scalar))
        kind = self._types[value.dtype.scalar]
        for place in zip(*numpy.nonzero(wanted), strict=True):
            cell: Any = (ctypes.c_uint16 if kind.itemsize == 2 else ctypes.c_uint8).from_address(int(addresses[place]))
            before[place] = cell.value
            there = numpy.array([cell.value, terms[place]], before.dtype)
            cell.value = torch.from_numpy(there).view(kind).float().sum().to(kind).view(_bits(kind)).item()
        return self._handle(before, value.dtype.scalar)

    def _reduced(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        """A reduction or scan in float32, of which each result has the type of its operand."""

        def run(reduction: Any, operands: tuple[Any, ...]) -> Any:
            kinds = [each.dtype.scalar for each in operands]
            if not any(kind in self._types for kind in kinds):
                return apply(reduction, operands)
            wide = tuple(self._widened_tensor(reduction, each) for each in operands)
            made: Any = apply(reduction, wide)
            results: list[Any] = [*made] if isinstance(made, (list, tuple)) else [made]
            return [self._narrowed(reduction, each, kind) for each, kind in zip(results, kinds, strict=True)]

        return run

    def _widened_tensor(self, reduction: Any, operand: Any) -> Any:
        if operand.dtype.scalar not in self._types:
            return operand
        return reduction.to_tensor(self._tensor(operand.handle).float().numpy(), self._wide)

    def _narrowed(self, reduction: Any, result: Any, kind: Any) -> Any:
        if kind not in self._types or result.dtype.scalar != self._wide:
            return result
        bits = self._rounded(self._tensor(result.handle), kind).data
        return reduction.to_tensor(bits if result.type.is_block() else bits.item(), kind)

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
        return self._handle(wide.to(narrow).view(_bits(narrow)).numpy(), kind)


def _bits(kind: torch.dtype) -> torch.dtype:
    return torch.uint16 if kind.itemsize == 2 else torch.uint8
