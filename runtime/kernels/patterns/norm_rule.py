"""RMSNorm, found forward, after the sum that is normalised, and backward."""

from __future__ import annotations

from typing import Final

from moaic.ir.graph import Op
from moaic.runtime.kernels.patterns.match import CAST, AnyPattern, Found, Sight, made
from moaic.runtime.kernels.patterns.rule import (
    Replacement,
    Work,
    as_type,
    first,
    is_norm,
    rows,
    summands,
    ways,
    wide,
    with_other_way,
)

_SCALE: Final = made(
    "aten.rsqrt",
    made(
        "aten.add.Tensor",
        made(
            "aten.div.Tensor",
            made(
                "aten.sum.dim_IntList",
                made("aten.pow.Tensor_Scalar", AnyPattern("x"), exponent=2),
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
_NORMED: Final = made("aten.mul.Tensor", AnyPattern("x"), AnyPattern("scale"))
_WEIGHED: Final = made("aten.mul.Tensor", AnyPattern("weight"), _NORMED)
_SLOPE: Final = made("aten.mul.Tensor", AnyPattern("grad"), AnyPattern("weight"))
_ALONG: Final = made(
    "aten.mul.Tensor",
    made(
        "aten.mul.Tensor",
        made(
            "aten.sum.dim_IntList",
            made("aten.mul.Tensor", _SLOPE, AnyPattern("x")),
            dim=AnyPattern("dim"),
            keepdim=True,
        ),
        None,
        other=-0.5,
    ),
    made("aten.pow.Tensor_Scalar", AnyPattern("scale"), exponent=3),
)
_ACROSS: Final = made("aten.mul.Tensor", _SLOPE, AnyPattern("scale"))
_BACK: Final = made(
    "aten.mul.Tensor",
    made("aten.div.Tensor", made("aten.expand", _ALONG, size=AnyPattern("size")), None, other=AnyPattern("width")),
    made("aten.mul.Tensor", made("aten.pow.Tensor_Scalar", AnyPattern("x"), exponent=1), None, other=2),
)
_OF_NORM: Final = (
    made("aten.add.Tensor", _ACROSS, _BACK),
    made("aten.add.Tensor", made("aten.add.Tensor", AnyPattern("through"), _ACROSS), _BACK),
)
"""Alone, and added up with what comes another way, as it is where nothing is cast."""
_OF_NORMS_WEIGHT: Final = made(
    "aten.sum.dim_IntList",
    made("aten.mul.Tensor", AnyPattern("grad"), _NORMED),
    dim=AnyPattern("rows"),
    keepdim=AnyPattern("kept"),
)


def forward(sight: Sight, anchor: Op) -> Replacement | None:
    found = next(ways(sight, _SCALE, anchor), None)
    weighed = None if found is None else first(sight, _WEIGHED, found, _is_rms_norm)
    if weighed is None:
        return None
    x, scale, y = sight.before(weighed["x"], CAST), weighed["scale"], weighed["result"]
    eps = weighed.attrs["eps"]
    if x.type != y.type or not isinstance(eps, float):
        return None
    work, weight = Work(loc=anchor.loc), weighed["weight"]
    added = summands(sight, x)
    if added is None:
        y_new, scale_new = work.call("rms_norm", [x, weight], [y.type, scale.type], eps=eps)
        instead = {y: y_new, scale: scale_new}
    else:
        kinds = [y.type, x.type, scale.type]
        y_new, total, scale_new = work.call("rms_norm_of_sum", [*added, weight], kinds, eps=eps)
        instead = {y: y_new, x: total, scale: scale_new}
    return Replacement("norm", rows(x), x.type.dtype, work.ops, instead)


def backward(sight: Sight, anchor: Op) -> Replacement | None:
    possible = (found for pattern in _OF_NORM for found in ways(sight, pattern, anchor))
    found = next(filter(_is_rms_norm, possible), None)
    if found is None:
        return None
    x, scale, weight, grad = sight.before(found["x"], CAST), found["scale"], found["weight"], found["grad"]
    if grad.type != x.type:
        return None
    every = tuple(range(len(x.type.shape) - 1))
    of_weight = first(sight, _OF_NORMS_WEIGHT, found, lambda each: each.attrs["rows"] == every)
    if of_weight is None:
        return None
    result, through = anchor.results[0], found.values.get("through")
    if through is None:
        result, through = with_other_way(sight, as_type(sight, result, x.type))
    work = Work(loc=anchor.loc)
    kinds = [x.type, wide(weight.type, *weight.type.shape)]
    dx, dweight = work.call("rms_norm_backward", [x, scale, weight, grad, through], kinds)
    ends = ((result, dx), (of_weight["result"], dweight))
    return Replacement("norm", rows(x), x.type.dtype, work.ops, {old: work.like(new, old) for old, new in ends})


def _is_rms_norm(found: Found) -> bool:
    return is_norm(found, "scale")
