"""Elementwise ops: functions of one element, arithmetic, comparisons, casts, masks, and their gradients."""

from __future__ import annotations

from moaic.ir.graph import Op, Value
from moaic.ir.ops.declaration import OpDecl, each
from moaic.ir.ops.rule_building import elementwise
from moaic.ir.rules import Rule
from moaic.ir.types import DTYPE_BYTES, FLOATING

_COMPARE_OR_SELECT = """abs ceil clamp clamp.Tensor clamp_max clamp_min eq.Scalar eq.Tensor floor ge.Scalar ge.Tensor
    gt.Scalar gt.Tensor isfinite isinf isnan le.Scalar le.Tensor logical_and logical_not logical_or logical_xor
    lt.Scalar lt.Tensor maximum minimum nan_to_num ne.Scalar ne.Tensor relu round sign trunc"""

_MANY_INSTRUCTIONS = """acos asin atan atan2 cos cosh erf erfinv exp exp2 expm1 fmod.Tensor gelu log log10 log1p log2
    mish pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor remainder.Tensor sigmoid silu sin sinh softplus tan tanh"""

_OTHERS = """acosh add.Scalar angle asinh atanh bitwise_and.Scalar bitwise_and.Tensor bitwise_not bitwise_or.Scalar
    bitwise_or.Tensor bitwise_xor.Scalar bitwise_xor.Tensor complex elu floor_divide
    fmod.Scalar hardsigmoid hardswish hardtanh leaky_relu log_sigmoid_forward polar reciprocal remainder.Scalar
    round.decimals rsqrt rsub.Scalar sgn sqrt square sub.Scalar signbit fmin fmax copysign.Tensor hypot ldexp.Tensor
    nextafter gcd lcm frexp.Tensor erfc lgamma digamma polygamma igamma igammac i0 special_i0e special_i1 special_i1e
    special_erfcx special_ndtri special_zeta special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
    special_airy_ai special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
    special_modified_bessel_k1 special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
    special_spherical_bessel_j0 special_chebyshev_polynomial_t special_chebyshev_polynomial_u
    special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_shifted_chebyshev_polynomial_t
    special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
    special_shifted_chebyshev_polynomial_w special_hermite_polynomial_h special_hermite_polynomial_he
    special_laguerre_polynomial_l special_legendre_polynomial_p"""


def _masked_fill(op: Op) -> Rule:
    """Linear where zeros are filled in: every term of a sum may be filled alike."""
    return elementwise(*([(0,)] if op.attrs.get("value") in (0, 0.0) else []))(op)


def _cast(op: Op) -> Rule:
    """Linear where no bits are lost: a narrower type would round each term of a sum."""
    source, target = op.operands[0], op.results[0].type.dtype
    assert isinstance(source, Value)
    widens = {source.type.dtype, target} <= FLOATING and DTYPE_BYTES[target] > DTYPE_BYTES[source.type.dtype]
    return elementwise(*([(0,)] if widens or source.type.dtype == target else []))(op)


OPS = (
    *each(_COMPARE_OR_SELECT, OpDecl("aten.*", elementwise(), exact=True)),
    *each(_MANY_INSTRUCTIONS, OpDecl("aten.*", elementwise(), cost="costly")),
    *each(_OTHERS, OpDecl("aten.*", elementwise())),
    *each("div.Scalar_mode div.Tensor_mode", OpDecl("aten.*", elementwise(), lowered=True)),
    *each("gelu_backward silu_backward", OpDecl("aten.*", elementwise((0,)), cost="costly")),
    *each(
        "tanh_backward sigmoid_backward elu_backward hardtanh_backward leaky_relu_backward native_dropout_backward",
        OpDecl("aten.*", elementwise((0,))),
    ),
    OpDecl("aten.threshold_backward", elementwise((0,)), exact=True),
    *each("neg clone alias detach lift_fresh_copy", OpDecl("aten.*", elementwise((0,)), exact=True)),
    *each("mul.Scalar div.Scalar div.Tensor conj_physical", OpDecl("aten.*", elementwise((0,)))),
    OpDecl("aten.mul.Tensor", elementwise((0,), (1,))),
    *each("add.Tensor sub.Tensor", OpDecl("aten.*", elementwise((0, 1)))),
    OpDecl("aten.where.self", elementwise((1, 2)), exact=True),
    OpDecl("aten.copy", elementwise((1,)), exact=True),
    OpDecl("aten.masked_fill.Scalar", _masked_fill, exact=True),
    OpDecl("aten._to_copy", _cast, exact=True),
)
