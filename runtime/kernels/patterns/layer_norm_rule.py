"""Rules for LayerNorm, forward, with the sum before it if there is one, and backward."""

from __future__ import annotations

from typing import Final

from moaic.ir.graph import Op, Value
from moaic.runtime.kernels.patterns.match import AnyPattern, DefUse, result_of
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

_NORMED: Final = result_of(
    "aten.mul.Tensor",
    result_of("aten.sub.Tensor", AnyPattern("x"), AnyPattern("mean")),
    AnyPattern("scale"),
    name="normed",
)
_SLOPE: Final = result_of("aten.mul.Tensor", AnyPattern("grad"), AnyPattern("weight"))
_BACK: Final = result_of(
    "aten.mul.Tensor",
    result_of("aten.div.Tensor", AnyPattern("scale"), None, other=AnyPattern("width")),
    result_of(
        "aten.sub.Tensor",
        result_of(
            "aten.sub.Tensor",
            result_of("aten.mul.Tensor", _SLOPE, None, other=AnyPattern("width")),
            result_of("aten.sum.dim_IntList", _SLOPE, dim=AnyPattern("dim"), keepdim=True),
        ),
        result_of(
            "aten.mul.Tensor",
            _NORMED,
            result_of(
                "aten.sum.dim_IntList",
                result_of("aten.mul.Tensor", _SLOPE, _NORMED),
                dim=AnyPattern("dim"),
                keepdim=True,
            ),
        ),
    ),
    name="result",
)
_OF_WEIGHT: Final = result_of(
    "aten.sum.dim_IntList", result_of("aten.mul.Tensor", AnyPattern("grad"), _NORMED), dim=AnyPattern("rows")
)
_OF_BIAS: Final = result_of("aten.sum.dim_IntList", AnyPattern("grad"), dim=AnyPattern("rows"))


def forward(uses: DefUse, anchor: Op) -> Replacement | None:
    if anchor.name != "aten.native_layer_norm":
        return None
    (x, weight, bias), (y, mean, scale) = anchor.operands, anchor.results
    eps, width = anchor.attrs["eps"], anchor.attrs["normalized_shape"]
    if not isinstance(x, Value) or not isinstance(weight, Value) or not isinstance(eps, float):
        return None
    if width != x.type.shape[-1:] or x.type != y.type:
        return None
    work, added = KernelBuilder(loc=anchor.loc), summands(uses, x)
    kept = [wide(x.type, *each.type.shape) for each in (mean, scale)]
    if added is None:
        results = work.call("layer_norm", [x, weight, bias], [y.type, *kept], eps=eps)
        old = [y, mean, scale]
    else:
        results = work.call("layer_norm_of_sum", [*added, weight, bias], [y.type, x.type, *kept], eps=eps)
        old = [y, x, mean, scale]
    instead = {before: work.like(after, before) for before, after in zip(old, results, strict=True)}
    return Replacement("norm", rows(x), x.type.dtype, work.ops, instead)


def backward(uses: DefUse, anchor: Op) -> Replacement | None:
    """Match the gradient of x, and those of weight and bias that the function computes."""
    found = next((each for each in matches(uses, _BACK, anchor) if is_norm(each, "mean", "scale")), None)
    if found is None:
        return None
    x, weight, grad = found["x"], found["weight"], found["grad"]
    if grad.type != x.type:
        return None
    every = tuple(range(len(x.type.shape) - 1))
    result, through = with_other_way(uses, as_type(uses, anchor.results[0], x.type))
    work = KernelBuilder(loc=anchor.loc)
    kinds = [x.type, *(wide(weight.type, *weight.type.shape) for _ in range(2))]
    operands = [x, found["mean"], found["scale"], weight, grad, through]
    dx, *of_params = work.call("layer_norm_backward", operands, kinds)
    instead = {result: work.like(dx, result)}
    for pattern, made_anew in zip((_OF_WEIGHT, _OF_BIAS), of_params, strict=True):
        wanted = first(uses, pattern, found, lambda each: each.attrs["rows"] == every)
        if wanted is not None:
            instead[wanted["result"]] = work.like(made_anew, wanted["result"])
    return Replacement("norm", rows(x), x.type.dtype, work.ops, instead)
