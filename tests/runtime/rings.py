"""Ring attention as a program, forward and backward, with operands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16}

MASKS = ("none", "looks", "numbers", "rows alone", "columns alone", "lowest")


@dataclass(frozen=True)
class Ring:
    """Sizes of attention, and the ranks that it goes round."""

    ranks: int
    rows: int
    columns: int
    causal: bool = False
    striped: bool = False
    mask: str = "none"
    dtype: str = "f32"
    batch: int = 2
    heads: int = 2
    width: int = 4
    value_width: int = 4

    @property
    def text(self) -> str:
        query, key, value, out = (
            f"{self.dtype}[{self.batch}, {self.heads}, {self._cut(length)}, {width}]"
            for length, width in zip(self._lengths, self._widths, strict=True)
        )
        stats = f"{'f64' if self.dtype == 'f64' else 'f32'}[{self.batch}, {self.heads}, {self._cut(self.rows)}]"
        param, mask = (f', %m: {self._mask_type} input "m"', "%m") if self._mask_shape else ("", "_")
        stripes = f", stripes = {self.ranks}" if self.striped else ""
        attrs = f'{{is_causal = {str(self.causal).lower()}, scale = 0.5, axis = "cp"{stripes}}}'
        return f"""// moai 1
mesh [cp={self.ranks}]
func @main(%q: {query} input "q", %k: {key} input "k", %v: {value} input "v", %g: {out} input "g"{param})
    -> ({out}, {stats}, {query}, {key}, {value}) {{
  %o, %l = moai.ring_sdpa %q, %k, %v, {mask} {attrs} : {out}, {stats}
  %dq, %dk, %dv = moai.ring_sdpa_backward %g, %q, %k, %v, %o, %l, {mask} {attrs} : {query}, {key}, {value}
  return %o, %l, %dq, %dk, %dv
}}
"""

    def inputs(self, seed: int = 0) -> list[Tensor]:
        """Under a mask some row sees nothing of one block, and another nothing at all."""
        at, kind = torch.Generator().manual_seed(seed), DTYPES[self.dtype]
        lengths_and_widths = zip(self._lengths, self._widths, strict=True)
        shapes: list[tuple[int, ...]] = [(self.batch, self.heads, *each) for each in lengths_and_widths]
        if self._mask_shape:
            shapes.append(self._mask_shape)
        *operands, last = (torch.randn(shape, generator=at, dtype=torch.float64).to(kind) for shape in shapes)
        return [*operands, self._masked(last) if self._mask_shape else last]

    def _cut(self, length: int) -> str:
        is_block = not self.striped or length == self.ranks
        return f"{length}{{cp}}" if is_block else f"{length}{{cp:1}}"

    @property
    def _lengths(self) -> Sequence[int]:
        return self.rows, self.columns, self.columns, self.rows

    @property
    def _widths(self) -> Sequence[int]:
        return self.width, self.width, self.value_width, self.value_width

    @property
    def _mask_shape(self) -> tuple[int, ...]:
        return {
            "none": (),
            "looks": (self.batch, 1, self.rows, self.columns),
            "numbers": (self.heads, self.rows, self.columns),
            "rows alone": (self.rows, 1),
            "columns alone": (self.batch, 1, 1, self.columns),
            "lowest": (self.rows, self.columns),
        }[self.mask]

    @property
    def _mask_type(self) -> str:
        shape = self._mask_shape
        spelled = [self._cut(n) if at == len(shape) - 2 and n > 1 else f"{n}" for at, n in enumerate(shape)]
        return f"{'bool' if self.mask == 'looks' else self.dtype}[{', '.join(spelled)}]"

    def _masked(self, drawn: Tensor) -> Tensor:
        block = self.columns // self.ranks
        if self.mask == "looks":
            looks = drawn > -0.3
            looks[..., 0, :block] = looks[..., -1, :] = False
            return looks
        if self.mask == "numbers":
            drawn[..., 0, block:] = drawn[..., -1, :] = -torch.inf
        elif self.mask == "lowest":
            drawn[0] = torch.finfo(drawn.dtype).min
        return drawn
