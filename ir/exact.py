"""Rounding that depends on shapes. An exact op moves, selects, compares or counts: its bits are the same in any shape.

Any other op may round otherwise for a part than for the whole: products and sums add in another order, functions are
computed by other instructions at the end of a row, a product may be fused with the sum after it. Results of such an op
computed twice, in different shapes, must not be compared.
"""

from __future__ import annotations

from moaic.ir.graph import Op
from moaic.ir.ops import Kind, declaration_of
from moaic.ir.types import FLOATING


def rounds(op: Op) -> bool:
    """Whether the bits of a compute op's results may depend on the shape in which it is run."""
    declaration = declaration_of(op)
    if declaration.kind is Kind.NULLARY:
        return any(isinstance(value, float) for name, value in op.attrs.items() if name in ("start", "step"))
    if declaration.kind is Kind.VIEW or declaration.exact:
        return False
    return any(value.type.dtype in FLOATING for value in (*op.inputs(), *op.results))
