"""Drawn instances of ops: shapes, attributes and values.

Sizes are small and often odd; floating-point values are float64 multiples of a quarter, so that ties and equal numbers
come up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor

from moaic.ir.graph import Attr, Op, Operand, Value
from moaic.ir.layout import Mesh
from moaic.ir.printer import render_op
from moaic.ir.types import TensorType
from moaic.runtime.codegen.lower_to_fx import run_op
from moaic.runtime.dtypes import DTYPE_NAMES

Shape = tuple[int, ...]
Given = Tensor | None | list[Tensor | None]

SIZES = (1, 2, 3, 4, 5, 6, 8, 9, 12)


@dataclass(frozen=True, eq=False)
class Case:
    """An op and the tensors it is run on, in the form of its operands. `defined` is false for uninitialized results."""

    op: Op
    tensors: tuple[Given, ...]
    defined: bool = True

    def flat(self) -> list[Tensor]:
        """The tensors in the order of the op's inputs."""
        lists = (tensor if isinstance(tensor, list) else [tensor] for tensor in self.tensors)
        return [tensor for tensors in lists for tensor in tensors if tensor is not None]

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """How hypothesis shows what failed."""
        names = {value: f"x{i}" for i, value in enumerate(self.op.inputs())}
        inputs = ", ".join(f"%{names[v]}: {v.type.dtype}{list(v.type.shape)}" for v in self.op.inputs())
        printer.text(f"{render_op(self.op, names, Mesh())} given {inputs}")


def case(name: str, *tensors: Given, **attrs: Attr) -> Case:
    """The case of one op on these tensors; its results are of the types that it gives."""
    operands = operands_like(tensors)
    kinds = [_type(tensor) for tensor in run_op(Op(name, operands, (), attrs), tensors)]
    return Case(Op(name, operands, tuple(Value(kind) for kind in kinds), attrs), tensors)


def operands_like(tensors: Sequence[Given]) -> tuple[Operand, ...]:
    return tuple(tuple(map(_value, each)) if isinstance(each, list) else _value(each) for each in tensors)


def _value(tensor: Tensor | None) -> Value | None:
    return None if tensor is None else Value(_type(tensor))


def _type(tensor: Tensor) -> TensorType:
    return TensorType(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))


class Drawn:
    """Shapes, choices and values of one case, all from hypothesis."""

    def __init__(self, draw: DrawFn) -> None:
        self.draw = draw
        self.random = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))

    def pick(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def number(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def size(self) -> int:
        return self.pick(*SIZES)

    def shape(self, low: int = 0, high: int = 3) -> Shape:
        return tuple(self.size() for _ in range(self.number(low, high)))

    def narrower(self, shape: Shape) -> Shape:
        """A shape that broadcasts to `shape`."""
        kept = shape[self.number(0, len(shape)) :] if self.pick(False, False, True) else shape
        return tuple(1 if self.pick(False, False, True) else size for size in kept)

    def real(self, *shape: int) -> Tensor:
        return torch.randint(-8, 9, shape, generator=self.random).double() / 4

    def fine(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random, dtype=torch.float64)

    def complex(self, *shape: int) -> Tensor:
        return torch.complex(self.real(*shape), self.real(*shape))

    def unit(self, *shape: int) -> Tensor:
        """Numbers well inside (0, 1), on which every function is defined."""
        return torch.rand(shape, generator=self.random, dtype=torch.float64) * 0.9 + 0.05

    def ints(self, *shape: int, low: int = -3, high: int = 4) -> Tensor:
        return torch.randint(low, high, shape, generator=self.random)

    def bools(self, *shape: int) -> Tensor:
        return self.ints(*shape, low=0, high=2).bool()

    def dim(self, rank: int) -> int:
        """A dim, counted from either end."""
        return self.number(-rank, rank - 1) if rank else self.pick(0, -1)

    def values(self, kind: str, shape: Shape) -> Tensor:
        make: dict[str, Callable[..., Tensor]] = {
            "r": self.real,
            "f": self.fine,
            "c": self.complex,
            "u": self.unit,
            "i": self.ints,
            "b": self.bools,
        }
        return make[kind](*shape)


Make = Callable[[Drawn, str], Case]


class Cases(dict[str, Make]):
    """Makers of the cases of one family by the op's name."""

    def __call__(self, names: str) -> Callable[[Make], Make]:
        """Registers a maker for ops of aten; a name with another namespace is written with it."""

        def register(make: Make) -> Make:
            for name in names.split():
                full = name if name.startswith("moai.") else f"aten.{name}"
                assert full not in self, full
                self[full] = make
            return make

        return register
