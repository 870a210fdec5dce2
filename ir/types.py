"""Tensor types: an element type, a global shape and a layout over the mesh."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from moaic.ir.layout import FULLY_REPLICATED, Layout, Mesh, Owner
from moaic.ir.sizes import in_example

DTYPE_BYTES: dict[str, int] = {
    "f64": 8,
    "f32": 4,
    "f16": 2,
    "bf16": 2,
    "f8e4m3fn": 1,
    "f8e5m2": 1,
    "f8e4m3fnuz": 1,
    "f8e5m2fnuz": 1,
    "i64": 8,
    "i32": 4,
    "i16": 2,
    "i8": 1,
    "u8": 1,
    "u64": 8,
    "u32": 4,
    "u16": 2,
    "bool": 1,
    "c32": 4,
    "c64": 8,
    "c128": 16,
}

FLOATING = frozenset({"f64", "f32", "f16", "bf16"})
"""Types in which ops compute; eight-bit floats are only operands of products."""

INTEGERS = frozenset({"i64", "i32", "i16", "i8", "u64", "u32", "u16", "u8", "bool"})

HALF = frozenset({"f16", "bf16"})
"""Sixteen-bit floats, in which long sums lose terms: sums are made in f32."""

FLOAT8 = frozenset({"f8e4m3fn", "f8e5m2", "f8e4m3fnuz", "f8e5m2fnuz"})
"""Named by their bits of exponent and mantissa; `fn` has no infinities, `fnuz` (AMD's MI300) no minus zero either."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """Element type, *global* shape and layout of a value; `f32[8{dp}, 384] +tp` in text."""

    dtype: str
    shape: tuple[int, ...]
    layout: Layout = FULLY_REPLICATED

    def with_layout(self, layout: Layout) -> TensorType:
        return TensorType(self.dtype, self.shape, layout)

    def at(self, owner: Owner) -> TensorType:
        """This type with another owner."""
        return self if self.layout.owner == owner else self.with_layout(replace(self.layout, owner=owner))

    def anywhere(self) -> TensorType:
        """This type without an owner: a function does not state the ranks that call it."""
        return self.at(())

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Shape of the part that one rank of `mesh` holds."""
        return self.layout.local_shape(self.shape, mesh)

    def local(self, mesh: Mesh) -> TensorType:
        """Type of the part that one rank holds, without a layout."""
        return TensorType(self.dtype, self.local_shape(mesh))

    def elements(self) -> int:
        return prod(self.shape)

    def nbytes(self) -> int:
        """Bytes of the whole value, all ranks' parts together; of open sizes, those in the example."""
        return prod(map(in_example, self.shape)) * DTYPE_BYTES[self.dtype]

    def local_nbytes(self, mesh: Mesh) -> int:
        return prod(map(in_example, self.local_shape(mesh))) * DTYPE_BYTES[self.dtype]
