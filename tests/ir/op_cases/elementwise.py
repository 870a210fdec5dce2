"""Cases of elementwise ops, by the kinds of their operands."""

from __future__ import annotations

from collections.abc import Mapping

from moaic.ir.graph import Attr
from tests.ir.op_cases.drawing import Case, Cases, Drawn, case

cases = Cases()


def alike(names: str, kinds: str, **attrs: Attr) -> dict[str, tuple[str, Mapping[str, Attr]]]:
    return dict.fromkeys(names.split(), (kinds, attrs))


# Kinds of the operands, then attributes. `r` has ties, `u` lies in (0, 1), `i` are integers, `b` truths.
ELEMENTWISE: Mapping[str, tuple[str, Mapping[str, Attr]]] = {
    **alike("abs asinh atan ceil cos cosh erf exp exp2 expm1 floor isinf isnan isfinite logical_not neg", "r"),
    **alike("relu round sigmoid sign sin sinh square tan tanh trunc elu gelu hardtanh leaky_relu silu softplus", "r"),
    **alike("mish hardswish hardsigmoid log_sigmoid_forward nan_to_num zeros_like ones_like", "r"),
    **alike("clone alias detach lift_fresh_copy", "r"),
    **alike("conj_physical angle sgn", "c"),
    **alike("complex polar", "rr"),
    **alike("acos asin atanh erfinv log log10 log1p log2 sqrt rsqrt reciprocal", "u"),
    **alike("acosh bitwise_not", "i"),
    **alike("signbit erfc i0 special_i0e special_i1 special_i1e special_erfcx special_airy_ai frexp.Tensor", "r"),
    **alike("special_bessel_j0 special_bessel_j1 special_modified_bessel_i0 special_modified_bessel_i1", "r"),
    **alike("lgamma digamma special_ndtri special_bessel_y0 special_bessel_y1 special_spherical_bessel_j0", "u"),
    **alike("special_modified_bessel_k0 special_modified_bessel_k1", "u"),
    **alike("special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1", "u"),
    **alike("round.decimals", "r", decimals=1),
    **alike("polygamma", "u", n=2),
    **alike("atan2 maximum minimum clamp.Tensor copy fmin fmax copysign.Tensor hypot ldexp.Tensor nextafter", "rr"),
    **alike("igamma igammac", "uu"),
    **alike("gcd lcm", "ii"),
    **alike("special_zeta", "iu"),
    **alike("special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v", "ui"),
    **alike("special_chebyshev_polynomial_w special_shifted_chebyshev_polynomial_t", "ui"),
    **alike("special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v", "ui"),
    **alike("special_shifted_chebyshev_polynomial_w special_hermite_polynomial_h", "ui"),
    **alike("special_hermite_polynomial_he special_laguerre_polynomial_l special_legendre_polynomial_p", "ui"),
    **alike("eq.Tensor ne.Tensor ge.Tensor gt.Tensor le.Tensor lt.Tensor", "rr"),
    **alike("eq.Scalar ne.Scalar ge.Scalar gt.Scalar le.Scalar lt.Scalar", "r", other=0.25),
    **alike("mul.Scalar div.Scalar add.Scalar sub.Scalar rsub.Scalar", "r", other=1.5),
    **alike("logical_and logical_or logical_xor", "br"),
    **alike("fmod.Scalar remainder.Scalar", "r", other=0.75),
    **alike("fmod.Tensor remainder.Tensor pow.Tensor_Tensor floor_divide", "uu"),
    **alike("bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor", "ii"),
    **alike("bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar", "i", other=5),
    **alike("clamp", "r", min=-0.5, max=1.0),
    **alike("clamp_min", "r", min=-0.5),
    **alike("clamp_max", "r", max=0.5),
    **alike("pow.Scalar", "r", self=2.0),
    **alike("pow.Tensor_Scalar", "r", exponent=3),
    **alike("div.Tensor_mode", "uu", rounding_mode="floor"),
    **alike("div.Scalar_mode", "r", other=0.75, rounding_mode="trunc"),
    **alike("masked_fill.Scalar", "rb", value=2.0),
    **alike("full_like", "r", fill_value=2.5),
    **alike("_to_copy", "f", dtype="f32"),
    **alike("where.self", "brr"),
    **alike("gelu_backward tanh_backward sigmoid_backward silu_backward", "rr"),
    **alike("threshold_backward", "rr", threshold=0),
    **alike("hardtanh_backward", "rr", min_val=-1.0, max_val=1.0),
    **alike("leaky_relu_backward", "rr", negative_slope=0.1, self_is_result=False),
    **alike("elu_backward", "rr", alpha=1.0, scale=1.0, input_scale=1.0, is_result=False),
    **alike("native_dropout_backward", "rb", scale=2.0),
}


@cases(" ".join(ELEMENTWISE))
def elementwise(d: Drawn, name: str) -> Case:
    kinds, attrs = ELEMENTWISE[name.removeprefix("aten.")]
    shape = d.shape()
    backward = name.endswith("backward")
    shapes = [shape, *(shape if backward else d.narrower(shape) for _ in kinds[1:])]
    if name != "aten.copy" and d.pick(False, True):
        shapes.reverse()
    return case(name, *(d.values(kind, each) for kind, each in zip(kinds, shapes, strict=True)), **attrs)


@cases("add.Tensor sub.Tensor mul.Tensor div.Tensor")
def arithmetic(d: Drawn, name: str) -> Case:
    """Two tensors, of which one may be of integers, or a tensor and a literal."""
    shape = d.shape()
    scaled: dict[str, Attr] = (
        {"alpha": 2} if name in ("aten.add.Tensor", "aten.sub.Tensor") and d.pick(False, True) else {}
    )
    if d.pick(False, False, True):
        return case(name, d.real(*shape), None, other=d.pick(3, 0.5), **scaled)
    other = d.values(d.pick("u", "u", "i"), d.narrower(shape))
    if d.pick(False, True) and other.dtype.is_floating_point:
        return case(name, other, d.unit(*shape), **scaled)
    if d.pick(False, False, True):
        return case(name, d.complex(*shape), d.complex(*d.narrower(shape)) * 4 + 0.5, **scaled)
    return case(name, d.unit(*shape), other.abs() + 1, **scaled)
