"""Drawn instances of every op: shapes, attributes and values on which its rule is proved.

Sizes are small and often odd; floating-point values are float64 multiples of a quarter, so that ties and equal numbers
come up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor

from moaic.ir.graph import Attr, Op, Operand, Value
from moaic.ir.layout import Mesh
from moaic.ir.printer import render_op
from moaic.ir.types import TensorType
from moaic.runtime.codegen.lower_to_fx import run_op
from moaic.runtime.dtypes import DTYPE_NAMES

Shape = tuple[int, ...]
Given = Tensor | None | list[Tensor | None]

SIZES = (1, 2, 3, 4, 5, 6, 8, 9, 12)


@dataclass(frozen=True, eq=False)
class Case:
    """An op and the tensors it is run on, in the form of its operands. `defined` is false for uninitialized results."""

    op: Op
    tensors: tuple[Given, ...]
    defined: bool = True

    def flat(self) -> list[Tensor]:
        """The tensors in the order of the op's inputs."""
        lists = (tensor if isinstance(tensor, list) else [tensor] for tensor in self.tensors)
        return [tensor for tensors in lists for tensor in tensors if tensor is not None]

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """How hypothesis shows what failed."""
        names = {value: f"x{i}" for i, value in enumerate(self.op.inputs())}
        inputs = ", ".join(f"%{names[v]}: {v.type.dtype}{list(v.type.shape)}" for v in self.op.inputs())
        printer.text(f"{render_op(self.op, names, Mesh())} given {inputs}")


def case(name: str, *tensors: Given, **attrs: Attr) -> Case:
    """The case of one op on these tensors; its results are of the types that it gives."""
    operands = operands_like(tensors)
    kinds = [_type(tensor) for tensor in run_op(Op(name, operands, (), attrs), tensors)]
    return Case(Op(name, operands, tuple(Value(kind) for kind in kinds), attrs), tensors)


def operands_like(tensors: Sequence[Given]) -> tuple[Operand, ...]:
    return tuple(tuple(map(_value, each)) if isinstance(each, list) else _value(each) for each in tensors)


def _value(tensor: Tensor | None) -> Value | None:
    return None if tensor is None else Value(_type(tensor))


def _type(tensor: Tensor) -> TensorType:
    return TensorType(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))


class Drawn:
    """Shapes, choices and values of one case, all from hypothesis."""

    def __init__(self, draw: DrawFn) -> None:
        self.draw = draw
        self.random = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))

    def pick(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def number(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def size(self) -> int:
        return self.pick(*SIZES)

    def shape(self, low: int = 0, high: int = 3) -> Shape:
        return tuple(self.size() for _ in range(self.number(low, high)))

    def narrower(self, shape: Shape) -> Shape:
        """A shape that broadcasts to `shape`."""
        kept = shape[self.number(0, len(shape)) :] if self.pick(False, False, True) else shape
        return tuple(1 if self.pick(False, False, True) else size for size in kept)

    def real(self, *shape: int) -> Tensor:
        return torch.randint(-8, 9, shape, generator=self.random).double() / 4

    def fine(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random, dtype=torch.float64)

    def complex(self, *shape: int) -> Tensor:
        return torch.complex(self.real(*shape), self.real(*shape))

    def unit(self, *shape: int) -> Tensor:
        """Numbers well inside (0, 1), on which every function is defined."""
        return torch.rand(shape, generator=self.random, dtype=torch.float64) * 0.9 + 0.05

    def ints(self, *shape: int, low: int = -3, high: int = 4) -> Tensor:
        return torch.randint(low, high, shape, generator=self.random)

    def bools(self, *shape: int) -> Tensor:
        return self.ints(*shape, low=0, high=2).bool()

    def dim(self, rank: int) -> int:
        """A dim, counted from either end."""
        return self.number(-rank, rank - 1) if rank else self.pick(0, -1)

    def values(self, kind: str, shape: Shape) -> Tensor:
        make: dict[str, Callable[..., Tensor]] = {
            "r": self.real,
            "f": self.fine,
            "c": self.complex,
            "u": self.unit,
            "i": self.ints,
            "b": self.bools,
        }
        return make[kind](*shape)


Make = Callable[[Drawn, str], Case]
CASES: dict[str, Make] = {}


def drawn(name: str) -> SearchStrategy[Case]:
    """Cases of the op called `name`."""

    @st.composite
    def make(draw: DrawFn) -> Case:
        return CASES[name](Drawn(draw), name)

    return make()


def cases(names: str) -> Callable[[Make], Make]:
    """Registers a maker for ops of aten; a name with another namespace is written with it."""

    def register(make: Make) -> Make:
        for name in names.split():
            full = name if name.startswith("moai.") else f"aten.{name}"
            assert full not in CASES, full
            CASES[full] = make
        return make

    return register


# Elementwise: kinds of the operands, then attributes. `r` has ties, `u` lies in (0, 1), `i` are integers, `b` truths.


def alike(names: str, kinds: str, **attrs: Attr) -> dict[str, tuple[str, Mapping[str, Attr]]]:
    return dict.fromkeys(names.split(), (kinds, attrs))


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


# Made from attributes alone.


@cases("full zeros ones empty.memory_format")
def constants(d: Drawn, name: str) -> Case:
    filled: dict[str, Attr] = {"fill_value": d.pick(0, 2.5)} if name == "aten.full" else {}
    dtype = d.pick("f64", "i64", "bool")
    attrs: dict[str, Attr] = {"size": d.shape(), "dtype": dtype, **filled}
    if name == "aten.empty.memory_format":
        made = case(name, **attrs)
        return Case(made.op, made.tensors, defined=False)
    return case(name, **attrs)


@cases("scalar_tensor")
def scalar_tensor(d: Drawn, name: str) -> Case:
    return case(name, s=d.number(-3, 3), dtype="f64")


@cases("arange arange.start arange.start_step")
def arange(d: Drawn, name: str) -> Case:
    start: dict[str, Attr] = {} if name == "aten.arange" else {"start": 2}
    step: dict[str, Attr] = {"step": 3} if name == "aten.arange.start_step" else {}
    return case(name, end=2 + d.size(), dtype="i64", **start, **step)


@cases("tril_indices triu_indices")
def triangle(d: Drawn, name: str) -> Case:
    return case(name, row=d.size(), col=d.size(), offset=d.number(-1, 1), dtype="i64")


@cases("moai.scaled_mm")
def scaled_mm(d: Drawn, name: str) -> Case:
    m, k, n = d.size(), d.pick(16, 32, 96, 24), d.pick(16, 32, 96, 24)
    left, right = (d.real(*shape).to(torch.float8_e4m3fn) for shape in ((m, k), (k, n)))
    scales = (d.unit(m, 1), d.unit(1, n)) if d.pick(False, True) else (d.unit(1, 1), d.unit(1, 1))
    return case(name, left, right, *scales, dtype="f64")


@cases("moai.fold_key")
def fold_key(d: Drawn, name: str) -> Case:
    return case(name, d.ints(2, low=0, high=2**31), instance=d.number(0, 9))


@cases("moai.checked")
def checked(d: Drawn, name: str) -> Case:
    """Of what belongs to the first dims of the value, and of something else."""
    shape = d.shape()
    said = shape[: d.number(0, len(shape))] if d.pick(True, True, False) else d.shape()
    good = torch.zeros(said, dtype=torch.int32) if d.pick(True, False) else torch.ones(said, dtype=torch.bool)
    return case(name, d.real(*shape), good, message="linalg.inv")


@cases("moai.add_to")
def add_to(d: Drawn, name: str) -> Case:
    shape = d.shape()
    return case(name, d.real(*shape), d.real(*shape))


@cases("moai.rand")
def rand(d: Drawn, name: str) -> Case:
    kind = TensorType(d.pick("f32", "f64"), d.shape())
    key = d.ints(2, low=0, high=2**31)
    return Case(Op(name, operands_like([key]), (Value(kind),)), (key,))


# Views.


def regrouped(d: Drawn, sizes: Shape) -> Shape:
    """A shape with the elements of `sizes`, neighbors multiplied together and ones strewn in."""
    shape: list[int] = []
    for at, size in enumerate(sizes):
        if at and d.pick(False, True):
            shape[-1] *= size
        else:
            shape += [1] * d.pick(0, 0, 0, 1) + [size]
    return (*shape, *[1] * d.pick(0, 0, 0, 1))


@cases("view")
def view(d: Drawn, name: str) -> Case:
    sizes = tuple(d.pick(1, 2, 3, 4, 6) for _ in range(d.number(1, 4)))
    left = regrouped(d, sizes)
    right = regrouped(d, sizes if d.pick(True, True, False) else sizes[::-1])
    holed = [-1 if at == len(right) - 1 and d.pick(False, True) else size for at, size in enumerate(right)]
    return case(name, d.real(*left), size=tuple(holed))


@cases("permute")
def permute(d: Drawn, name: str) -> Case:
    shape = d.shape(0, 4)
    order = d.draw(st.permutations(range(len(shape))))
    return case(name, d.real(*shape), dims=tuple(at - len(shape) if d.pick(False, True) else at for at in order))


@cases("transpose.int")
def transpose(d: Drawn, name: str) -> Case:
    shape = d.shape()
    return case(name, d.real(*shape), dim0=d.dim(len(shape)), dim1=d.dim(len(shape)))


@cases("t")
def t(d: Drawn, name: str) -> Case:
    return case(name, d.real(*d.shape(0, 2)))


@cases("expand")
def expand(d: Drawn, name: str) -> Case:
    shape = d.shape(1)
    source = d.narrower(shape)
    lead = len(shape) - len(source)
    size = [-1 if at >= lead and source[at - lead] == n and d.pick(False, True) else n for at, n in enumerate(shape)]
    return case(name, d.real(*source), size=tuple(size))


@cases("view_as_complex view_as_real")
def complex_views(d: Drawn, name: str) -> Case:
    shape = d.shape()
    return case(name, d.real(*shape, 2) if name.endswith("complex") else d.complex(*shape))


@cases("unsqueeze")
def unsqueeze(d: Drawn, name: str) -> Case:
    shape = d.shape()
    return case(name, d.real(*shape), dim=d.number(-len(shape) - 1, len(shape)))


@cases("squeeze squeeze.dim squeeze.dims")
def squeeze(d: Drawn, name: str) -> Case:
    shape = tuple(d.pick(1, 1, 2, 3, 6) for _ in range(d.number(1, 4)))
    if name == "aten.squeeze":
        return case(name, d.real(*shape))
    dims = d.draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, max_size=2, unique=True))
    return case(name, d.real(*shape), dim=dims[0] if name == "aten.squeeze.dim" else tuple(dims))


# Cuts and joins.


@cases("slice.Tensor")
def slice_(d: Drawn, name: str) -> Case:
    shape = d.shape(1)
    dim = d.dim(len(shape))
    size = shape[dim]
    equal = [n for n in range(1, size + 1) if size % n == 0]
    length = d.pick(*equal)
    start = d.pick(*range(0, size, length)) if d.pick(True, True, False) else d.number(0, size - 1)
    ends = (min(start + length, size), size, 2**63 - 1)
    signed = start - size if d.pick(False, True) else start
    step: dict[str, Attr] = {"step": d.pick(2, 3)} if d.pick(False, False, True) else {}
    return case(name, d.real(*shape), dim=dim, start=signed, end=d.pick(*ends), **step)


def lengths(d: Drawn) -> list[int]:
    """Sizes of pieces, half of the time all equal."""
    count, size = d.number(1, 4), d.size()
    return [size] * count if d.pick(False, True) else [d.size() for _ in range(count)]


@cases("split_with_sizes")
def split_with_sizes(d: Drawn, name: str) -> Case:
    sizes, shape = lengths(d), list(d.shape(1))
    dim = d.dim(len(shape))
    shape[dim] = sum(sizes)
    return case(name, d.real(*shape), split_sizes=tuple(sizes), dim=dim)


@cases("split.Tensor")
def split(d: Drawn, name: str) -> Case:
    shape = d.shape(1)
    return case(name, d.real(*shape), split_size=d.pick(1, 2, 3, 4, 6), dim=d.dim(len(shape)))


@cases("cat")
def cat(d: Drawn, name: str) -> Case:
    shape = list(d.shape(1))
    dim = d.dim(len(shape))
    parts: list[Tensor | None] = []
    for size in lengths(d):
        shape[dim] = size
        parts.append(d.real(*shape))
    if d.pick(False, False, False, True):
        parts.insert(d.number(0, len(parts)), d.real(0))
    return case(name, parts, dim=dim)


@cases("select.int")
def select(d: Drawn, name: str) -> Case:
    shape = d.shape(1)
    dim = d.dim(len(shape))
    return case(name, d.real(*shape), dim=dim, index=d.number(-shape[dim], shape[dim] - 1))


@cases("slice_scatter")
def slice_scatter(d: Drawn, name: str) -> Case:
    shape = d.shape(1)
    dim = d.dim(len(shape))
    start = d.number(0, shape[dim] - 1)
    end = d.number(start + 1, shape[dim])
    step: dict[str, Attr] = {"step": 2} if d.pick(False, False, True) else {}
    whole = d.real(*shape)
    part = torch.ops.aten.slice.Tensor(whole, dim, start, end, step.get("step", 1))
    return case(name, whole, d.real(*part.shape), dim=dim, start=start, end=end, **step)


@cases("constant_pad_nd")
def pad(d: Drawn, name: str) -> Case:
    shape = d.shape(1)
    pads: list[Attr] = []
    for at in range(d.number(1, len(shape))):
        size = shape[len(shape) - 1 - at]
        pads += d.pick((0, 0), (1, 0), (0, 2), (2, 1), (0, -1 if size > 1 else 0))
    value: dict[str, Attr] = {"value": 1.5} if d.pick(False, True) else {}
    return case(name, d.real(*shape), pad=tuple(pads), **value)


@cases("flip")
def flip(d: Drawn, name: str) -> Case:
    shape = d.shape(1)
    dims = d.draw(st.lists(st.integers(0, len(shape) - 1), max_size=2, unique=True))
    return case(name, d.real(*shape), dims=tuple(at - len(shape) if d.pick(False, True) else at for at in dims))


# Reductions, and what runs along a dim.


@cases("sum prod mean any all")
def reduce_all(d: Drawn, name: str) -> Case:
    return case(name, d.real(*d.shape()))


def keepdim(d: Drawn) -> dict[str, Attr]:
    return {"keepdim": True} if d.pick(False, True) else {}


@cases("sum.dim_IntList mean.dim amax amin any.dims logsumexp var.correction var_mean.correction")
def reduce_dims(d: Drawn, name: str) -> Case:
    """Over some dims, or over all of them where that may be left unsaid."""
    shape = d.shape(1)
    dims = d.draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, max_size=len(shape), unique=True))
    signed = tuple(at - len(shape) if d.pick(False, True) else at for at in dims)
    attrs: dict[str, Attr] = {"correction": 0} if "var" in name else {}
    if name == "aten.logsumexp" or d.pick(True, True, False):
        attrs |= {"dim": signed}
    elif name in ("aten.sum.dim_IntList", "aten.mean.dim"):
        attrs |= {"dim": d.pick(None, ())}
    return case(name, d.real(*shape), **attrs, **keepdim(d))


@cases("any.dim all.dim prod.dim_int max.dim min.dim argmax argmin")
def reduce_dim(d: Drawn, name: str) -> Case:
    shape = d.shape()
    if "arg" in name and d.pick(False, False, True):
        return case(name, d.fine(*shape))
    return case(name, d.real(*shape), dim=d.dim(len(shape)), **keepdim(d))


@cases("median.dim nanmedian.dim kthvalue mode")
def order_statistic(d: Drawn, name: str) -> Case:
    """Of numbers without ties, which may be at any of their places."""
    shape = d.shape(1)
    last = "median" not in name and d.pick(False, True)
    dim = -1 if last else d.dim(len(shape))
    attrs: dict[str, Attr] = {"k": d.number(1, shape[dim])} if name == "aten.kthvalue" else {}
    return case(name, d.fine(*shape), **attrs, **({} if last else {"dim": dim}), **keepdim(d))


@cases("_softmax _log_softmax")
def softmax(d: Drawn, name: str) -> Case:
    shape = d.shape()
    return case(name, d.real(*shape), dim=d.dim(len(shape)), half_to_float=False)


@cases("_softmax_backward_data _log_softmax_backward_data")
def softmax_backward(d: Drawn, name: str) -> Case:
    shape = d.shape()
    return case(name, d.fine(*shape), d.unit(*shape), dim=d.dim(len(shape)), input_dtype="f64")


@cases("cumprod logcumsumexp cummax cummin")
def cumulative(d: Drawn, name: str) -> Case:
    shape = d.shape(1)
    return case(name, d.unit(*shape), dim=d.dim(len(shape)))


@cases("cumsum")
def cumsum(d: Drawn, name: str) -> Case:
    shape = d.shape()
    return case(name, d.values(d.pick("r", "b"), shape), dim=d.dim(len(shape)))


@cases("topk")
def topk(d: Drawn, name: str) -> Case:
    shape = d.shape(1)
    dim = d.pick(None, d.dim(len(shape)))
    attrs: dict[str, Attr] = {} if dim is None else {"dim": dim}
    return case(name, d.fine(*shape), k=d.number(1, shape[-1 if dim is None else dim]), **attrs)


@cases("sort sort.stable")
def sort(d: Drawn, name: str) -> Case:
    shape = d.shape(1)
    attrs: dict[str, Attr] = {} if d.pick(False, True) else {"dim": d.dim(len(shape)), "descending": True}
    return case(name, d.fine(*shape), **({"stable": True} if name.endswith("stable") else {}), **attrs)


# Look-ups.


def indexed_shape(d: Drawn, shape: Shape, dim: int) -> Shape:
    """An index over `dim` of a tensor of `shape`: other dims are as long, or shorter."""
    sizes = [size if d.pick(True, True, False) else d.number(1, size) for size in shape]
    sizes[dim] = d.number(1, shape[dim])
    return tuple(sizes)


@cases("gather")
def gather(d: Drawn, name: str) -> Case:
    shape = d.shape(1)
    dim = d.dim(len(shape))
    index = d.ints(*indexed_shape(d, shape, dim), low=0, high=shape[dim])
    return case(name, d.real(*shape), index, dim=dim)


@cases("scatter.value scatter.src scatter_add")
def scatter(d: Drawn, name: str) -> Case:
    """Indices along the dim are distinct: what wins among equal ones is not defined."""
    shape = d.shape(1)
    dim = d.dim(len(shape))
    sizes = indexed_shape(d, shape, dim)
    order = torch.rand(*sizes[: dim % len(shape)], shape[dim], *sizes[dim % len(shape) + 1 :], generator=d.random)
    index = order.argsort(dim).narrow(dim, 0, sizes[dim]).contiguous()
    if name == "aten.scatter.value":
        return case(name, d.real(*shape), index, dim=dim, value=-1.0)
    source = tuple(size if d.pick(True, True, False) else size + 1 for size in sizes)
    return case(name, d.real(*shape), index, d.real(*source), dim=dim)


def index_operands(d: Drawn, shape: Shape) -> tuple[list[Tensor | None], Shape]:
    """Index tensors for some dims of `shape`, and the shape that they have together."""
    chosen = d.draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, max_size=len(shape), unique=True))
    together = d.shape(0, 2)
    shapes = {at: together if at == min(chosen) else d.narrower(together) for at in chosen}
    indices = [
        d.ints(*shapes[at], low=-size if d.pick(False, True) else 0, high=size) if at in chosen else None
        for at, size in enumerate(shape[: max(chosen) + 1])
    ]
    return indices, together


@cases("histc")
def histc(d: Drawn, name: str) -> Case:
    return case(name, d.real(*d.shape(1)), bins=d.number(1, 5), min=-1, max=2)


@cases("index.Tensor")
def index(d: Drawn, name: str) -> Case:
    shape = d.shape(1)
    if d.pick(False, False, False, True):
        return case(name, d.real(*shape), [d.bools(shape[0])])
    return case(name, d.real(*shape), index_operands(d, shape)[0])


@cases("index_put")
def index_put(d: Drawn, name: str) -> Case:
    shape = d.shape(1)
    accumulate: dict[str, Attr] = {"accumulate": True} if d.pick(False, True) else {}
    base, (indices, _) = d.real(*shape), index_operands(d, shape)
    values = torch.ops.aten.index.Tensor(base, indices)
    # Without accumulation equal indices must be given equal values: one number for all.
    filling = d.real(*d.narrower(tuple(values.shape))) if accumulate else torch.full_like(values, 1.5)
    return case(name, base, indices, filling, **accumulate)


@cases("embedding")
def embedding(d: Drawn, name: str) -> Case:
    rows = d.size()
    padding: dict[str, Attr] = {"padding_idx": 0} if d.pick(False, True) else {}
    return case(name, d.real(rows, d.size()), d.ints(*d.shape(), low=0, high=rows), **padding)


@cases("embedding_dense_backward")
def embedding_dense_backward(d: Drawn, name: str) -> Case:
    rows, shape = d.size(), d.shape()
    ids = d.ints(*shape, low=0, high=rows)
    attrs: dict[str, Attr] = {"padding_idx": d.pick(-1, 0), "scale_grad_by_freq": d.pick(False, False, True)}
    return case(name, d.real(*shape, d.size()), ids, num_weights=rows, **attrs)


# Norms, matrices, windows, attention.


@cases("native_layer_norm")
def native_layer_norm(d: Drawn, name: str) -> Case:
    shape = d.shape(1)
    normal = shape[d.number(0, len(shape) - 1) :]
    weight, bias = (d.fine(*normal) if d.pick(True, False) else None for _ in range(2))
    return case(name, d.fine(*shape), weight, bias, normalized_shape=normal, eps=1e-5)


@cases("native_layer_norm_backward")
def native_layer_norm_backward(d: Drawn, name: str) -> Case:
    forward = native_layer_norm(d, "aten.native_layer_norm")
    x, weight, bias = forward.tensors
    _, mean, rstd = run_op(forward.op, forward.tensors)
    assert isinstance(x, Tensor)
    mask = (d.pick(True, False), weight is not None, bias is not None)
    mask = mask if any(mask) else (True, *mask[1:])
    normal = forward.op.attrs["normalized_shape"]
    grad = d.fine(*x.shape)
    return case(name, grad, x, mean, rstd, weight, bias, normalized_shape=normal, output_mask=mask)


@cases("mm bmm")
def matrices(d: Drawn, name: str) -> Case:
    m, k, n = d.size(), d.size(), d.size()
    lead = (d.size(),) if name == "aten.bmm" else ()
    return case(name, d.fine(*lead, m, k), d.fine(*lead, k, n))


def regular(d: Drawn, *batch: int) -> Tensor:
    """Symmetric matrices far from singular."""
    size = d.number(1, 4)
    x = d.unit(*batch, size, size)
    return x @ x.mT + torch.eye(size, dtype=x.dtype)


@cases("linalg_cholesky_ex linalg_inv_ex linalg_qr linalg_lu_factor_ex _linalg_det _linalg_slogdet")
def taken_apart(d: Drawn, name: str) -> Case:
    return case(name, regular(d, *d.shape(0, 2)))


@cases("_linalg_svd _linalg_eigh")
def spectrum(d: Drawn, name: str) -> Case:
    """With and without vectors, which are no results then but tensors of nothing."""
    wanted: dict[str, Attr] = {"compute_uv" if name.endswith("svd") else "compute_v": d.pick(True, True, False)}
    return case(name, regular(d, *d.shape(0, 2)), **wanted)


@cases("linalg_solve_triangular _linalg_solve_ex linalg_lu_solve")
def solved(d: Drawn, name: str) -> Case:
    """Many systems, or right sides of many for one system."""
    batch = d.shape(0, 2)
    left = regular(d, *(batch if name.endswith("ex") else d.narrower(batch)))
    vectors = name.endswith("ex") and d.pick(False, False, True)
    right = d.fine(*batch, left.shape[-1], *(() if vectors else (d.size(),)))
    if name == "aten.linalg_lu_solve":
        factors, pivots, _ = torch.ops.aten.linalg_lu_factor_ex(left)
        return case(name, factors, pivots, right)
    if name == "aten._linalg_solve_ex":
        return case(name, left, right)
    upper = d.pick(False, True)
    return case(name, left.triu() if upper else left.tril(), right, upper=upper)


@cases("diagonal diagonal_scatter")
def diagonal(d: Drawn, name: str) -> Case:
    shape = d.shape(2, 4)
    one, other = d.draw(st.permutations(range(len(shape))))[:2]
    attrs: dict[str, Attr] = {"offset": d.pick(0, 0, 1, -1), "dim1": one, "dim2": other - len(shape)}
    x = d.real(*shape)
    found = torch.ops.aten.diagonal.default(x, **attrs)
    return case(name, x, *([d.real(*found.shape)] if name.endswith("scatter") else []), **attrs)


@cases("_fft_r2c _fft_c2c _fft_c2r")
def transformed(d: Drawn, name: str) -> Case:
    shape = d.shape(1)
    dims = d.draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, max_size=2, unique=True))
    x = d.real(*shape) if name.endswith("r2c") else d.complex(*shape)
    attrs: dict[str, Attr] = {"dim": tuple(dims), "normalization": d.pick(0, 1)}
    if name == "aten._fft_c2r":
        return case(name, x, **attrs, last_dim_size=max(1, 2 * (shape[dims[-1]] - 1)))
    side = "onesided" if name.endswith("r2c") else "forward"
    return case(name, x, **attrs, **{side: d.pick(False, True)})


def convolved(d: Drawn) -> tuple[Tensor, Tensor, dict[str, Attr]]:
    """Input, weight and geometry of a convolution over one or two dims."""
    spatial, groups, transposed = d.number(1, 2), d.pick(1, 1, 1, 2, 3), d.pick(False, False, True)
    ins, outs = (groups * d.pick(1, 2, 3, 4) for _ in range(2))
    window = [d.number(1, 3) for _ in range(spatial)]
    x = d.fine(d.pick(1, 2, 3, 4, 5), ins, *(size + d.number(0, 3) for size in window))
    weight = d.fine(*((ins, outs // groups) if transposed else (outs, ins // groups)), *window)
    attrs: dict[str, Attr] = {
        "stride": (d.pick(1, 2),) * spatial,
        "padding": (0,) * spatial if transposed else (d.pick(0, 1),) * spatial,
        "dilation": (1,) * spatial,
        "transposed": transposed,
        "output_padding": (0,) * spatial,
        "groups": groups,
    }
    return x, weight, attrs


@cases("convolution")
def convolution(d: Drawn, name: str) -> Case:
    x, weight, attrs = convolved(d)
    outs = weight.shape[1] * (attrs["groups"] if isinstance(attrs["groups"], int) else 1)
    bias = d.fine(outs if attrs["transposed"] else weight.shape[0]) if d.pick(False, False, True) else None
    return case(name, x, weight, bias, **attrs)


@cases("convolution_backward")
def convolution_backward(d: Drawn, name: str) -> Case:
    x, weight, attrs = convolved(d)
    forward = case("aten.convolution", x, weight, None, **attrs)
    grad = d.fine(*forward.op.results[0].type.shape)
    mask = d.pick(
        (True, True, True), (True, True, False), (False, True, False), (True, False, True), (False, False, True)
    )
    attrs = {"bias_sizes": (grad.shape[1],) if mask[2] else None, **attrs, "output_mask": mask}
    return case(name, grad, x, weight, **attrs)


def spatial(name: str) -> int:
    """How many dims a window has, by the name of its op."""
    return next(dims for dims in (1, 2, 3) if f"{dims}d" in name)


def aten(name: str) -> Callable[..., Any]:
    return getattr(torch.ops.aten, name.removeprefix("aten."))


def images(d: Drawn, dims: int = 2) -> Tensor:
    lead = tuple(d.pick(1, 2, 3, 4, 6) for _ in range(d.number(1, 2)))
    return d.fine(*lead, *(d.number(2, 6 if dims < 3 else 4) for _ in range(dims)))


def windows(d: Drawn, dims: int) -> dict[str, Attr]:
    rest = dims - 1
    return {
        "kernel_size": (2,) * dims,
        "stride": (d.pick(1, 2), *[1] * rest),
        "padding": (d.pick(0, 1), *[0] * rest),
    }


@cases("max_pool2d_with_indices avg_pool2d max_pool3d_with_indices avg_pool3d")
def pool(d: Drawn, name: str) -> Case:
    dims = spatial(name)
    return case(name, images(d, dims), **windows(d, dims))


@cases("max_pool2d_with_indices_backward max_pool3d_with_indices_backward")
def max_pool_backward(d: Drawn, name: str) -> Case:
    dims = spatial(name)
    x, attrs = images(d, dims), {**windows(d, dims), "dilation": (1,) * dims, "ceil_mode": False}
    out, indices = aten(name.removesuffix("_backward"))(x, *attrs.values())
    given = (d.fine(*out.shape), x)
    return case(name, *given, indices, **attrs)


@cases("avg_pool2d_backward avg_pool3d_backward")
def avg_pool_backward(d: Drawn, name: str) -> Case:
    dims = spatial(name)
    x, window = images(d, dims), windows(d, dims)
    grad = d.fine(*aten(name.removesuffix("_backward"))(x, *window.values()).shape)
    rest: dict[str, Attr] = {"ceil_mode": False, "count_include_pad": d.pick(False, True), "divisor_override": None}
    return case(name, grad, x, **window, **rest)


@cases("_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d")
def adaptive_pool(d: Drawn, name: str) -> Case:
    dims = spatial(name)
    return case(name, images(d, dims), output_size=tuple(d.pick(1, 2) for _ in range(dims)))


@cases("_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward")
def adaptive_pool_backward(d: Drawn, name: str) -> Case:
    dims = spatial(name)
    x = images(d, dims)
    return case(name, d.fine(*x.shape[:-dims], *(d.pick(1, 2) for _ in range(dims))), x)


@cases("adaptive_max_pool2d_backward adaptive_max_pool3d_backward")
def adaptive_max_backward(d: Drawn, name: str) -> Case:
    dims = spatial(name)
    x = images(d, dims)
    out, indices = aten(name.removesuffix("_backward"))(x, [d.pick(1, 2) for _ in range(dims)])
    return case(name, d.fine(*out.shape), x, indices)


@cases(" ".join(f"{how}_pad{dims}d_backward" for how in ("replication", "reflection") for dims in (1, 2, 3)))
def padded_backward(d: Drawn, name: str) -> Case:
    dims = spatial(name)
    x = images(d, dims)
    padding = tuple(d.number(0, 1) for _ in range(2 * dims))
    out = aten(name.removesuffix("_backward"))(x, padding)
    return case(name, d.fine(*out.shape), x, padding=padding)


def sampled(d: Drawn, name: str) -> tuple[Tensor, Tensor, dict[str, Attr]]:
    """A picture, places in it, of which some lie outside, and how to read between pixels."""
    dims = spatial(name)
    batch, channels = d.pick(1, 2, 4), d.pick(1, 2, 3)
    picture = d.fine(batch, channels, *(d.number(2, 4) for _ in range(dims)))
    places = d.fine(batch, *(d.pick(1, 2, 4) for _ in range(dims)), dims)
    attrs: dict[str, Attr] = {
        "interpolation_mode": d.pick(0, 1),
        "padding_mode": d.pick(0, 1, 2),
        "align_corners": d.pick(False, True),
    }
    return picture, places, attrs


@cases("grid_sampler_2d grid_sampler_3d")
def sample(d: Drawn, name: str) -> Case:
    picture, places, attrs = sampled(d, name)
    return case(name, picture, places, **attrs)


@cases("grid_sampler_2d_backward grid_sampler_3d_backward")
def sample_backward(d: Drawn, name: str) -> Case:
    picture, places, attrs = sampled(d, name)
    grad = d.fine(*picture.shape[:2], *places.shape[1:-1])
    return case(name, grad, picture, places, **attrs, output_mask=d.pick((True, True), (False, True), (True, False)))


def attention(d: Drawn) -> tuple[list[Tensor | None], dict[str, Attr]]:
    """Query, key, value and mask, and the attributes."""
    b, h = d.pick(1, 2, 3, 4), d.pick(1, 2, 3, 4, 6)
    rows, columns, width = d.number(1, 5), d.number(1, 5), d.pick(2, 4)
    wide = width if d.pick(True, False) else 3
    mask = d.pick("none", "causal", "truths", "numbers")
    shape = d.pick(
        (b, 1, rows, columns), (b, h, rows, columns), (1, 1, rows, columns), (1, h, 1, columns), (rows, columns)
    )
    given = d.fine(*shape) if mask == "numbers" else None
    if mask == "truths":
        # Every row may look at something.
        given = d.bools(*shape) | (torch.arange(columns) == 0)
    query, key, value = d.fine(b, h, rows, width), d.fine(b, h, columns, width), d.fine(b, h, columns, wide)
    return [query, key, value, given], {"is_causal": mask == "causal", "scale": d.pick(0.5, 0.25)}


@cases("moai.sdpa")
def sdpa(d: Drawn, name: str) -> Case:
    tensors, attrs = attention(d)
    return case(name, *tensors, **attrs)


@cases("moai.sdpa_backward")
def sdpa_backward(d: Drawn, name: str) -> Case:
    (query, key, value, mask), attrs = attention(d)
    forward = case("moai.sdpa", query, key, value, mask, **attrs)
    out, logsumexp = run_op(forward.op, forward.tensors)
    return case(name, d.fine(*out.shape), query, key, value, out, logsumexp, mask, **attrs)


def grouped(d: Drawn) -> tuple[int, int, int, int, Tensor]:
    """Blocks (none if zero), matrices, rows, an inner size, and the matrix of each row, which may be none."""
    blocks, rows, inner = d.pick(0, 1, 2, 4), d.size(), d.pick(1, 2, 3)
    count = max(1, blocks) * d.pick(1, 2, 3)
    return blocks, count, rows, inner, d.ints(rows, low=-1, high=count)


@cases("moai.grouped_mm")
def grouped_mm(d: Drawn, name: str) -> Case:
    blocks, count, rows, inner, ids = grouped(d)
    x = d.real(*(() if not blocks else (d.pick(1, blocks),)), rows, inner)
    return blocked(name, [x, d.real(count, d.size(), inner), ids], blocks)


@cases("moai.grouped_outer")
def grouped_outer(d: Drawn, name: str) -> Case:
    blocks, count, rows, inner, ids = grouped(d)
    shared = d.pick(0, 1)
    one, other = ((() if not blocks else (blocks if i == shared else d.pick(1, blocks),)) for i in range(2))
    return case(name, d.real(*one, rows, inner), d.real(*other, rows, d.size()), ids, count=count)


def blocked(name: str, tensors: list[Tensor], blocks: int) -> Case:
    """How many blocks a product has, its result says."""
    x, weight, _ = tensors
    shape = (*((blocks,) if blocks else ()), x.shape[-2], weight.shape[1])
    result = Value(TensorType(DTYPE_NAMES[x.dtype], shape))
    return Case(Op(name, operands_like(tensors), (result,)), tuple(tensors))
