"""Rewrites of random ops into arithmetic on uniform numbers, u and v below.

The numbers are drawn from a key and the position of the element, so that they do not depend on the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, log1p, pi
from typing import Any, Final

from moaic.capture.fx.op_call import OpCall, Rewrite, cast_to_result, each_of
from moaic.capture.provenance import described
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Attr, Value
from moaic.ir.types import TensorType


def _rand(call: OpCall) -> Value:
    return cast_to_result(call, call.builder.rand(call.type.shape))


def _bernoulli(call: OpCall) -> Value:
    uniform = call.builder.rand(call.type.shape)
    bools = TensorType("bool", call.type.shape)
    probability = call.operands[1] if len(call.operands) > 1 else None
    if "p" in call.attrs:
        drawn = call.emit("aten.lt.Scalar", uniform, type_=bools, other=call.attrs["p"])
    else:
        drawn = call.emit("aten.lt.Tensor", uniform, probability or call.x, type_=bools)
    return cast_to_result(call, drawn)


def _dropout(call: OpCall) -> list[Value]:
    """`x * (u > p) / (1 - p)`, and the mask `u > p`."""
    p, train = call.attrs["p"], call.attrs.get("train", True)
    assert isinstance(p, int | float)
    type_, mask_type = call.types
    if train is False or p == 0:
        ones = call.emit("aten.full", type_=mask_type, size=mask_type.shape, fill_value=True, dtype="bool")
        return [call.x, ones]
    mask = call.emit("aten.gt.Scalar", call.builder.rand(type_.shape), type_=mask_type, other=float(p))
    kept = call.emit("aten.mul.Tensor", call.x, mask, type_=type_)
    scale = 1.0 / (1.0 - p) if p < 1 else 0.0
    return [call.emit("aten.mul.Tensor", kept, None, type_=type_, other=scale), mask]


def _randn(call: OpCall) -> Value:
    return cast_to_result(call, _standard_normal(call))


def _standard_normal(call: OpCall) -> Value:
    """Box-Muller: sqrt(-2 ln(1 - u)) cos(2 pi v)."""
    drawn = _minus_log(call)
    wide = drawn.type
    radius = call.emit("aten.sqrt", call.emit("aten.mul.Tensor", drawn, None, type_=wide, other=2.0), type_=wide)
    v = call.builder.rand(wide.shape)
    angle = call.emit("aten.cos", call.emit("aten.mul.Tensor", v, None, type_=wide, other=2 * pi), type_=wide)
    return call.emit("aten.mul.Tensor", radius, angle, type_=wide)


def _integers(call: OpCall) -> Value:
    """floor(u * (high - low)) + low; ranges up to 2**24 are exact."""
    low, high = call.attrs.get("low", 0), call.attrs["high"]
    assert isinstance(low, int)
    assert isinstance(high, int)
    uniform = call.builder.rand(call.type.shape)
    wide = uniform.type
    scaled = call.emit("aten.mul.Tensor", uniform, None, type_=wide, other=float(high - low))
    floored = cast_to_result(call, call.emit("aten.floor", scaled, type_=wide))
    return call.emit("aten.add.Tensor", floored, None, other=low) if low else floored


def _uniform(call: OpCall) -> Value:
    low, high = call.attrs.get("from", 0.0), call.attrs.get("to", 1.0)
    assert isinstance(low, int | float)
    assert isinstance(high, int | float)
    wide = TensorType("f32", call.type.shape)
    return cast_to_result(call, _scaled(call, call.builder.rand(wide.shape), float(high - low), low))


def _scaled(call: OpCall, x: Value, scale: Attr, shift: Attr) -> Value:
    scaled = call.emit("aten.mul.Tensor", x, None, type_=x.type, other=scale)
    return call.emit("aten.add.Tensor", scaled, None, type_=x.type, other=shift)


def _exponential(call: OpCall) -> Value:
    """-ln(1 - u) / lambda, never zero: -ln(1 - u) is at least half the epsilon of float32, as in PyTorch."""
    drawn = _minus_log(call)
    type_, rate = drawn.type, call.attrs.get("lambd", 1.0)
    positive = call.emit("aten.clamp_min", drawn, type_=type_, min=2.0**-24)
    return cast_to_result(call, call.emit("aten.div.Tensor", positive, None, type_=type_, other=rate))


def _geometric(call: OpCall) -> Value:
    """Number of tries until one succeeds: exponential numbers of rate -ln(1 - p), rounded up."""
    p = call.attrs["p"]
    assert isinstance(p, int | float)
    drawn = _minus_log(call)
    tries = call.emit("aten.div.Tensor", drawn, None, type_=drawn.type, other=-log1p(-p) if p < 1 else inf)
    ceiled = call.emit("aten.ceil", tries, type_=drawn.type)
    return cast_to_result(call, call.emit("aten.clamp_min", ceiled, type_=drawn.type, min=1.0))


def _minus_log(call: OpCall) -> Value:
    """-ln(1 - u)."""
    wide = TensorType("f32", call.type.shape)
    rest = _scaled(call, call.builder.rand(wide.shape), -1.0, 1.0)
    return call.emit("aten.neg", call.emit("aten.log", rest, type_=wide), type_=wide)


def _cauchy(call: OpCall) -> Value:
    """Median + sigma tan(pi (u - 1/2))."""
    wide = TensorType("f32", call.type.shape)
    angle = _scaled(call, call.builder.rand(wide.shape), pi, -pi / 2)
    drawn = call.emit("aten.tan", angle, type_=wide)
    return cast_to_result(call, _scaled(call, drawn, call.attrs.get("sigma", 1.0), call.attrs.get("median", 0.0)))


def _normal_functional(call: OpCall) -> Value:
    return cast_to_result(call, _normal(call, 0.0, 1.0))


def _log_normal(call: OpCall) -> Value:
    drawn = _normal(call, 1.0, 2.0)
    return cast_to_result(call, call.emit("aten.exp", drawn, type_=drawn.type))


def _normal(call: OpCall, mean: float, std: float) -> Value:
    """Normal numbers with the call's mean and standard deviation, or with these where it names none."""
    return _scaled(call, _standard_normal(call), call.attrs.get("std", std), call.attrs.get("mean", mean))


def _refuse_random(call: OpCall) -> Any:
    raise Diagnostic(
        f"`{call.name}` draws random numbers in a way that would depend on the plan{described(call.builder.loc)}",
        hint="draw from torch.rand, torch.randn or dropout, or draw outside the compiled model",
    )


RANDOM_REWRITES: Final[Mapping[str, Rewrite]] = {
    **each_of("aten.rand aten.rand_like", _rand),
    **each_of("aten.bernoulli aten.bernoulli.p aten.bernoulli.Tensor", _bernoulli),
    "aten.native_dropout": _dropout,
    **each_of("aten.randn aten.randn_like", _randn),
    **each_of("aten.randint aten.randint.low aten.randint_like aten.randint_like.low_dtype", _integers),
    "aten.uniform": _uniform,
    "aten.exponential": _exponential,
    "aten.geometric": _geometric,
    "aten.cauchy": _cauchy,
    "aten.log_normal": _log_normal,
    "aten.normal_functional": _normal_functional,
    **each_of(
        "aten.multinomial aten.normal.Tensor_Tensor aten.poisson aten.binomial aten._standard_gamma", _refuse_random
    ),
}
