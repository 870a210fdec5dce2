"""LayerNorm, found forward, after the sum that is normalised, and backward."""

from __future__ import annotations

from typing import Final

from moaic.ir.graph import Op, Value
from moaic.runtime.kernels.patterns.match import AnyPattern, Sight, made
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

_NORMED: Final = made(
    "aten.mul.Tensor", made("aten.sub.Tensor", AnyPattern("x"), AnyPattern("mean")), AnyPattern("scale"), name="normed"
)
_SLOPE: Final = made("aten.mul.Tensor", AnyPattern("grad"), AnyPattern("weight"))
_BACK: Final = made(
    "aten.mul.Tensor",
    made("aten.div.Tensor", AnyPattern("scale"), None, other=AnyPattern("width")),
    made(
        "aten.sub.Tensor",
        made(
            "aten.sub.Tensor",
            made("aten.mul.Tensor", _SLOPE, None, other=AnyPattern("width")),
            made("aten.sum.dim_IntList", _SLOPE, dim=AnyPattern("dim"), keepdim=True),
        ),
        made(
            "aten.mul.Tensor",
            _NORMED,
            made("aten.sum.dim_IntList", made("aten.mul.Tensor", _SLOPE, _NORMED), dim=AnyPattern("dim"), keepdim=True),
        ),
    ),
    name="result",
)
_OF_WEIGHT: Final = made(
    "aten.sum.dim_IntList", made("aten.mul.Tensor", AnyPattern("grad"), _NORMED), dim=AnyPattern("rows")
)
_OF_BIAS: Final = made("aten.sum.dim_IntList", AnyPattern("grad"), dim=AnyPattern("rows"))


def forward(sight: Sight, anchor: Op) -> Replacement | None:
    if anchor.name != "aten.native_layer_norm":
        return None
    (x, weight, bias), (y, mean, scale) = anchor.operands, anchor.results
    eps, width = anchor.attrs["eps"], anchor.attrs["normalized_shape"]
    if not isinstance(x, Value) or not isinstance(weight, Value) or not isinstance(eps, float):
        return None
    if width != x.type.shape[-1:] or x.type != y.type:
        return None
    work, added = Work(loc=anchor.loc), summands(sight, x)
    kept = [wide(x.type, *each.type.shape) for each in (mean, scale)]
    if added is None:
        results = work.call("layer_norm", [x, weight, bias], [y.type, *kept], eps=eps)
        old = [y, mean, scale]
    else:
        results = work.call("layer_norm_of_sum", [*added, weight, bias], [y.type, x.type, *kept], eps=eps)
        old = [y, x, mean, scale]
    instead = {before: work.like(after, before) for before, after in zip(old, results, strict=True)}
    return Replacement("norm", rows(x), x.type.dtype, work.ops, instead)


def backward(sight: Sight, anchor: Op) -> Replacement | None:
    """Of the gradients of weight and bias those that somebody wants."""
    found = next((each for each in ways(sight, _BACK, anchor) if is_norm(each, "mean", "scale")), None)
    if found is None:
        return None
    x, weight, grad = found["x"], found["weight"], found["grad"]
    if grad.type != x.type:
        return None
    every = tuple(range(len(x.type.shape) - 1))
    result, through = with_other_way(sight, as_type(sight, anchor.results[0], x.type))
    work = Work(loc=anchor.loc)
    kinds = [x.type, *(wide(weight.type, *weight.type.shape) for _ in range(2))]
    operands = [x, found["mean"], found["scale"], weight, grad, through]
    dx, *of_params = work.call("layer_norm_backward", operands, kinds)
    instead = {result: work.like(dx, result)}
    for pattern, made_anew in zip((_OF_WEIGHT, _OF_BIAS), of_params, strict=True):
        wanted = first(sight, pattern, found, lambda each: each.attrs["rows"] == every)
        if wanted is not None:
            instead[wanted["result"]] = work.like(made_anew, wanted["result"])
    return Replacement("norm", rows(x), x.type.dtype, work.ops, instead)
