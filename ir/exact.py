"""Ops that move, select, compare or count: their results are the same bits in whatever shape they are run.

Any other may round otherwise for a part than for the whole: products and sums add in another order, functions are
computed by other instructions at the end of a row, a product may be fused with the sum after it. What is made by such
an op may not be made twice and then compared.
"""

from __future__ import annotations

from moaic.ir.graph import Op
from moaic.ir.ops import Kind, kind_of
from moaic.ir.types import FLOATING

_ATEN = """abs neg sign ceil floor trunc round relu maximum minimum clamp clamp.Tensor clamp_max clamp_min
    threshold_backward nan_to_num isfinite isinf isnan eq.Scalar eq.Tensor ne.Scalar ne.Tensor ge.Scalar ge.Tensor
    gt.Scalar gt.Tensor le.Scalar le.Tensor lt.Scalar lt.Tensor logical_and logical_not logical_or logical_xor
    where.self masked_fill.Scalar full_like zeros_like ones_like copy clone alias detach lift_fresh_copy _to_copy
    amax amin any any.dim any.dims all all.dim argmax argmin max.dim min.dim sort sort.stable topk cat flip
    slice_scatter constant_pad_nd gather scatter.value scatter.src index.Tensor embedding max_pool2d_with_indices"""

_NAMES = frozenset({"moai.rand", "moai.fold_key", *(f"aten.{name}" for name in _ATEN.split())})


def rounds(op: Op) -> bool:
    """Whether the bits of what a compute op makes may depend on the shape in which it is run."""
    if kind_of(op) is Kind.NULLARY:
        return any(isinstance(value, float) for name, value in op.attrs.items() if name in ("start", "step"))
    if kind_of(op) is Kind.VIEW or op.name in _NAMES:
        return False
    return any(value.type.dtype in FLOATING for value in (*op.inputs(), *op.results))
