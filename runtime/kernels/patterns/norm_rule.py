"""Rules for RMSNorm, forward, with the sum before it if there is one, and backward."""

from __future__ import annotations

from typing import Final

from moaic.ir.graph import Op
from moaic.runtime.kernels.patterns.match import CAST, AnyPattern, DefUse, Match, result_of
from moaic.runtime.kernels.patterns.rule import (
    KernelBuilder,
    Replacement,
    as_type,
    first,
    is_norm,
    matches,
    rows,
    summands,
    wide,
    with_other_way,
)

_SCALE: Final = result_of(
    "aten.rsqrt",
    result_of(
        "aten.add.Tensor",
        result_of(
            "aten.div.Tensor",
            result_of(
                "aten.sum.dim_IntList",
                result_of("aten.pow.Tensor_Scalar", AnyPattern("x"), exponent=2),
                dim=AnyPattern("dim"),
                keepdim=True,
            ),
            None,
            other=AnyPattern("width"),
        ),
        None,
        other=AnyPattern("eps"),
    ),
    name="scale",
)
_NORMED: Final = result_of("aten.mul.Tensor", AnyPattern("x"), AnyPattern("scale"))
_WEIGHED: Final = result_of("aten.mul.Tensor", AnyPattern("weight"), _NORMED)
_SLOPE: Final = result_of("aten.mul.Tensor", AnyPattern("grad"), AnyPattern("weight"))
_ALONG: Final = result_of(
    "aten.mul.Tensor",
    result_of(
        "aten.mul.Tensor",
        result_of(
            "aten.sum.dim_IntList",
            result_of("aten.mul.Tensor", _SLOPE, AnyPattern("x")),
            dim=AnyPattern("dim"),
            keepdim=True,
        ),
        None,
        other=-0.5,
    ),
    result_of("aten.pow.Tensor_Scalar", AnyPattern("scale"), exponent=3),
)
_ACROSS: Final = result_of("aten.mul.Tensor", _SLOPE, AnyPattern("scale"))
_BACK: Final = result_of(
    "aten.mul.Tensor",
    result_of(
        "aten.div.Tensor", result_of("aten.expand", _ALONG, size=AnyPattern("size")), None, other=AnyPattern("width")
    ),
    result_of("aten.mul.Tensor", result_of("aten.pow.Tensor_Scalar", AnyPattern("x"), exponent=1), None, other=2),
)
_OF_NORM: Final = (
    result_of("aten.add.Tensor", _ACROSS, _BACK),
    result_of("aten.add.Tensor", result_of("aten.add.Tensor", AnyPattern("through"), _ACROSS), _BACK),
)
"""The gradient of x; the second is the form without casts of its sum with the gradient of other uses of x."""
_OF_NORMS_WEIGHT: Final = result_of(
    "aten.sum.dim_IntList",
    result_of("aten.mul.Tensor", AnyPattern("grad"), _NORMED),
    dim=AnyPattern("rows"),
    keepdim=AnyPattern("kept"),
)


def forward(uses: DefUse, anchor: Op) -> Replacement | None:
    found = next(matches(uses, _SCALE, anchor), None)
    weighed = None if found is None else first(uses, _WEIGHED, found, _is_rms_norm)
    if weighed is None:
        return None
    x, scale, y = uses.before(weighed["x"], CAST), weighed["scale"], weighed["result"]
    eps = weighed.attrs["eps"]
    if x.type != y.type or not isinstance(eps, float):
        return None
    work, weight = KernelBuilder(loc=anchor.loc), weighed["weight"]
    added = summands(uses, x)
    if added is None:
        y_new, scale_new = work.call("rms_norm", [x, weight], [y.type, scale.type], eps=eps)
        instead = {y: y_new, scale: scale_new}
    else:
        kinds = [y.type, x.type, scale.type]
        y_new, total, scale_new = work.call("rms_norm_of_sum", [*added, weight], kinds, eps=eps)
        instead = {y: y_new, x: total, scale: scale_new}
    return Replacement("norm", rows(x), x.type.dtype, work.ops, instead)


def backward(uses: DefUse, anchor: Op) -> Replacement | None:
    possible = (found for pattern in _OF_NORM for found in matches(uses, pattern, anchor))
    found = next(filter(_is_rms_norm, possible), None)
    if found is None:
        return None
    x, scale, weight, grad = uses.before(found["x"], CAST), found["scale"], found["weight"], found["grad"]
    if grad.type != x.type:
        return None
    every = tuple(range(len(x.type.shape) - 1))
    of_weight = first(uses, _OF_NORMS_WEIGHT, found, lambda each: each.attrs["rows"] == every)
    if of_weight is None:
        return None
    result, through = anchor.results[0], found.values.get("through")
    if through is None:
        result, through = with_other_way(uses, as_type(uses, result, x.type))
    work = KernelBuilder(loc=anchor.loc)
    kinds = [x.type, wide(weight.type, *weight.type.shape)]
    dx, dweight = work.call("rms_norm_backward", [x, scale, weight, grad, through], kinds)
    ends = ((result, dx), (of_weight["result"], dweight))
    return Replacement("norm", rows(x), x.type.dtype, work.ops, {old: work.like(new, old) for old, new in ends})


def _is_rms_norm(found: Match) -> bool:
    return is_norm(found, "scale")
