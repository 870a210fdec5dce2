"""The functions of the vendors' device libraries (libdevice, OCML), on arrays of the host.

Functions of one argument are computed in float64 and rounded once, so they are at least as exact as on a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy
import torch
from torch import Tensor

Array = Any
"""A NumPy array, for which Triton's interpreter has no stub."""


def _wide(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function` computed in float64; its result has the type of the first argument."""

    def run(first: Tensor, *others: Tensor) -> Tensor:
        return function(first.double(), *(each.double() for each in others)).to(first.dtype)

    return run


def _pow(base: Tensor, exponent: Tensor) -> Tensor:
    return torch.pow(base.double(), exponent.double()).to(base.dtype)


def _fused(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return x * y + z


def _away_from_zero(x: Tensor) -> Tensor:
    """The nearest whole number; of two, the one that is further from zero."""
    return x.sign() * (x.abs() + 0.5).floor()


def _to_nearest(x: Tensor) -> Tensor:
    return x.round().to(torch.int64)


def _exponent(x: Tensor) -> Tensor:
    return (torch.frexp(x).exponent - 1).to(torch.int32)


def _scaled(x: Tensor, exponent: Tensor) -> Tensor:
    return torch.ldexp(x.double(), exponent.double()).to(x.dtype)


_special: Final[Any] = torch.special

FUNCTIONS: Final[Mapping[str, Callable[..., Tensor]]] = {
    **{
        name: _wide(getattr(torch, name))
        for name in (
            *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "ceil", "copysign", "cos", "cosh", "erf"),
            *("erfc", "erfinv", "exp", "exp2", "expm1", "floor", "fmod", "hypot", "lgamma", "log", "log10", "log1p"),
            *("log2", "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
        )
    },
    "erfcx": _wide(_special.erfcx),
    **dict.fromkeys(("cyl_bessel_i0", "i0"), _wide(_special.i0)),
    **dict.fromkeys(("cyl_bessel_i1", "i1"), _wide(_special.i1)),
    "j0": _wide(_special.bessel_j0),
    "j1": _wide(_special.bessel_j1),
    "y0": _wide(_special.bessel_y0),
    "y1": _wide(_special.bessel_y1),
    "fast_tanh": _wide(torch.tanh),
    "fma": _wide(_fused),
    "fmul_rn": torch.mul,
    "dmul_rn": torch.mul,
    **dict.fromkeys(("pow", "powi", "pown"), _pow),
    **dict.fromkeys(("nearbyint", "rint"), torch.round),
    "llrint": _to_nearest,
    "nextafter": torch.nextafter,
    "ilogb": _exponent,
    "ldexp": _scaled,
    "isnan": torch.isnan,
    "isinf": torch.isinf,
    **dict.fromkeys(("finite", "isfinite"), torch.isfinite),
    "signbit": torch.signbit,
    **dict.fromkeys(("abs", "fabs", "llabs"), torch.abs),
    "round": _wide(_away_from_zero),
}
"""By the vendors' names, without what these say of the types."""

_NAME: Final = re.compile(r"__(?:nv|ocml)_(\w+?)(?:_f32|_f64)?$")


def called(symbol: str, arguments: list[Array]) -> Array:
    """The result of a library function, by its symbol: `__nv_erff`, `__ocml_erf_f64`."""
    named = _NAME.match(symbol)
    name = named[1] if named else symbol
    # libdevice ends the names of functions of float32 in f, and of some of float64 in d.
    function = FUNCTIONS.get(name) or FUNCTIONS.get(name[:-1])
    if function is None:
        raise NotImplementedError(f"{symbol} is not known to the emulation: runtime/emulation/device_functions.py")
    return function(*(torch.from_numpy(numpy.ascontiguousarray(each)) for each in arguments)).numpy()
