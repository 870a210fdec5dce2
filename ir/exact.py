"""Ops that move, select, compare or count: their results are the same bits in whatever shape they are run.

Any other may round otherwise for a part than for the whole: products and sums add in another order, functions are
computed by other instructions at the end of a row, a product may be fused with the sum after it. What is made by such
an op may not be made twice and then compared.
"""

from __future__ import annotations

from moaic.ir.graph import Op
from moaic.ir.ops import Kind, declaration_of
from moaic.ir.types import FLOATING


def rounds(op: Op) -> bool:
    """Whether the bits of what a compute op makes may depend on the shape in which it is run."""
    declaration = declaration_of(op)
    if declaration.kind is Kind.NULLARY:
        return any(isinstance(value, float) for name, value in op.attrs.items() if name in ("start", "step"))
    if declaration.kind is Kind.VIEW or declaration.exact:
        return False
    return any(value.type.dtype in FLOATING for value in (*op.inputs(), *op.results))
