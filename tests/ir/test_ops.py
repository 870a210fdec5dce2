"""Every rule proved by execution: the joined results of an op on shards equal the op on global tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from moaic.ir.graph import Function, Op, Value
from moaic.ir.layout import REPLICATED, Layout, Mesh, State
from moaic.ir.localize import asked_axes, localize, refit
from moaic.ir.ops import OPS, Kind, rule_of
from moaic.ir.rules import Dims, Rule, Strategy, fits
from moaic.ir.types import TensorType
from moaic.runtime.codegen.lower_to_fx import example, run_op, run_ops
from moaic.runtime.protocol.tensor_parts import assemble, local_part
from tests.ir.op_cases import CASES, Case, drawn

COMPUTE = [name for name, declaration in OPS.items() if declaration.kind is not Kind.INSTRUCTION]

NOTHING_SPLITS = frozenset(
    {
        "aten.all",
        "aten.any",
        "aten.prod",
        "aten.tril_indices",
        "aten.triu_indices",
        "aten.scalar_tensor",
        "moai.fold_key",
    }
)
"""Ops whose rule holds every dim whole."""

RAISE_FOR_ZEROS = frozenset({"aten.linalg_lu_solve", "moai.checked"})
"""Ops that raise for values, also for the padding of uneven parts."""

OF_MODELS = """
    aten._log_softmax aten._softmax aten._to_copy aten.add.Tensor aten.arange.start_step aten.bitwise_and.Tensor
    aten.bitwise_not aten.bmm aten.cat aten.constant_pad_nd aten.convolution aten.convolution_backward aten.cos
    aten.div.Scalar aten.div.Tensor aten.embedding aten.embedding_dense_backward aten.eq.Scalar aten.erf aten.exp
    aten.expand aten.full aten.gather aten.ge.Scalar aten.gelu aten.gt.Tensor aten.index.Tensor aten.le.Scalar
    aten.le.Tensor aten.max_pool2d_with_indices aten.max_pool2d_with_indices_backward aten.mm aten.mul.Scalar
    aten.mul.Tensor aten.native_layer_norm aten.ne.Scalar aten.neg aten.permute aten.pow.Tensor_Scalar aten.relu
    aten.rsqrt aten.scatter.value aten.select.int aten.sigmoid aten.sin aten.slice.Tensor aten.slice_scatter
    aten.split_with_sizes aten.sub.Tensor aten.sum.dim_IntList aten.tanh aten.view aten.where.self moai.rand moai.sdpa
    moai.sdpa_backward
"""
"""What Llama, Qwen2, Mistral, GPT-2, BERT, ViT and ResNet consist of when they are trained."""

PROFILE = settings(
    max_examples=20,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)

TOLERANCE = 1e-10


@dataclass(frozen=True, slots=True)
class Laid:
    """A strategy over one mesh axis of `size` ranks."""

    axis: str
    size: int
    strategy: Strategy


def test_every_op_has_a_case() -> None:
    assert set(COMPUTE) == set(CASES)


def test_what_models_are_made_of_splits() -> None:
    assert set(OF_MODELS.split()) <= set(OPS) - NOTHING_SPLITS


@pytest.mark.parametrize("name", COMPUTE)
def test_splits(name: str) -> None:
    """Every factor, by every digit, over 2 and 3 ranks; every linear set; uneven pieces where they are contiguous."""
    proven: list[int] = []

    @PROFILE
    @given(drawn(name))
    def prove(case: Case) -> None:
        wholes = run_op(case.op, case.tensors)
        rule = rule_of(case.op)
        for laid in single_axes(case, rule):
            check(case, wholes, [laid])
            proven.append(1)
        for factor in rule.sizes:
            if factor not in rule.whole and rule.sizes[factor] > 1 and not asks_where(case, rule, factor):
                check_uneven(case, wholes, rule, factor)

    prove()
    assert bool(proven) == (name not in NOTHING_SPLITS)


@pytest.mark.parametrize("name", [name for name in COMPUTE if name not in NOTHING_SPLITS])
def test_two_axes_at_once(name: str) -> None:
    @PROFILE
    @given(drawn(name), st.data())
    def prove(case: Case, data: st.DataObject) -> None:
        options = list(single_axes(case, rule_of(case.op)))
        if not options:
            return
        one, other = (data.draw(st.sampled_from(options)) for _ in range(2))
        laid = [replace(one, axis="a"), replace(other, axis="b")]
        if all(fit(value, laid, index) for index, value in enumerate((*case.op.inputs(), *case.op.results))):
            check(case, run_op(case.op, case.tensors), laid)

    prove()


@pytest.mark.parametrize("name", [name for name in COMPUTE if name not in NOTHING_SPLITS])
def test_parts_traced_have_their_shapes(name: str) -> None:
    """What is compiled is traced first: attributes that say sizes must fit there too."""

    @settings(PROFILE, max_examples=6)
    @given(drawn(name), st.data())
    def prove(case: Case, data: st.DataObject) -> None:
        options = list(single_axes(case, rule_of(case.op)))
        if not options:
            return
        laid = data.draw(st.sampled_from(options))
        local = localize(annotated(case.op, [laid]), Mesh(((laid.axis, laid.size),)))
        with FakeTensorMode():
            results = run_ops(local, [example(value.type) for value in local.params])
        assert [tuple(each.shape) for each in results] == [value.type.shape for value in local.results]

    prove()


def single_axes(case: Case, rule: Rule) -> Iterator[Laid]:
    """Every strategy that follows from the rule, over 2 and over 3 ranks."""
    for size in (2, 3):
        for factor, length in rule.sizes.items():
            for stride in range(1, -(-length // size) + 1):
                strategy = rule.by_factor(factor, stride, size)
                assert strategy is not None or factor in rule.whole or length % (stride * size) != 0
                raises = length % (stride * size) != 0 and case.op.name in RAISE_FOR_ZEROS
                if strategy is not None and not raises:
                    yield Laid("a", size, strategy)
    inputs = list(case.op.inputs())
    for linear in rule.linear:
        # A truth value is no sum; that it counts as linear says that zero gives zero.
        if not any(inputs[i].type.dtype == "bool" for i in linear):
            yield Laid("a", 2, rule.by_linearity(linear))


def asks_where(case: Case, rule: Rule, factor: str) -> bool:
    """Whether parts along the factor are told where they lie, which pieces here are not."""
    size = rule.sizes[factor]
    strategy = rule.by_factor(factor, 1, size)
    assert strategy is not None
    (op,) = annotated(case.op, [Laid("a", size, strategy)]).ops
    return bool(asked_axes(op, ["a"]))


def states(laid: Laid) -> tuple[State, ...]:
    return (*laid.strategy.operands, *laid.strategy.results)


def fit(value: Value, laid: Sequence[Laid], index: int) -> bool:
    """Whether the value can be laid over both axes."""
    one, other = laid
    mesh = Mesh(((one.axis, one.size), (other.axis, other.size)))
    return fits(laid_out(value.type, [one], index), other.axis, states(other)[index], mesh)


def laid_out(tensor: TensorType, laid: Sequence[Laid], index: int) -> TensorType:
    layout = tensor.layout
    for each in laid:
        layout = layout.with_state(each.axis, states(each)[index])
    return tensor.with_layout(layout)


def check(case: Case, wholes: Sequence[Tensor], laid: Sequence[Laid]) -> None:
    """The localized op on every rank of the mesh gives parts of the whole results."""
    mesh = Mesh(tuple((each.axis, each.size) for each in laid))
    function = annotated(case.op, laid)
    local = localize(function, mesh)
    inputs = [placed(t, p.type.layout, mesh) for t, p in zip(case.flat(), function.params, strict=True)]
    made: list[list[Tensor]] = []
    for rank in range(mesh.ranks):
        at = mesh.coordinates(rank)
        coordinates = [torch.tensor(at[local.param_role(i).label]) for i in range(len(inputs), len(local.params))]
        results = run_ops(local, [*(ranks[rank] for ranks in inputs), *coordinates])
        for result, value in zip(results, local.results, strict=True):
            assert tuple(result.shape) == value.type.shape, (case, laid)
        made.append(results)
    for index, (whole, result) in enumerate(zip(wholes, function.results, strict=True)):
        if case.defined:
            for put_together in recombined([results[index] for results in made], result.type, mesh):
                assert equal(put_together, whole), f"result {index} by {laid}, rule {rule_of(case.op)}"


def annotated(op: Op, laid: Sequence[Laid]) -> Function:
    """A function of one op, laid out as the strategies say."""
    values = [Value(laid_out(v.type, laid, index)) for index, v in enumerate((*op.inputs(), *op.results))]
    count = len(values) - len(op.results)
    rest = iter(values[:count])
    operands = tuple(
        tuple(None if v is None else next(rest) for v in operand)
        if isinstance(operand, tuple)
        else None
        if operand is None
        else next(rest)
        for operand in op.operands
    )
    results = tuple(values[count:])
    return Function("f", tuple(values[:count]), (replace(op, operands=operands, results=results),), results)


def placed(whole: Tensor, layout: Layout, mesh: Mesh) -> list[Tensor]:
    """What each rank holds of `whole`; pending sums are taken apart at random."""
    summands = dict.fromkeys(product(*(range(mesh.size(axis)) for axis in layout.partial)), whole)
    if layout.partial:
        random = torch.Generator().manual_seed(0)
        first, *others = summands
        for key in others:
            summands[key] = (torch.randn(whole.shape, generator=random, dtype=torch.float64) * 4).to(whole.dtype)
        summands[first] = whole - sum(summands[key] for key in others)
    coordinates = map(mesh.coordinates, range(mesh.ranks))
    keys = [tuple(at[axis] for axis in layout.partial) for at in coordinates]
    return [local_part(summands[key], mesh, layout, rank).contiguous() for rank, key in enumerate(keys)]


def recombined(parts: Sequence[Tensor], type_: TensorType, mesh: Mesh) -> Iterator[Tensor]:
    """The whole value from the parts of all ranks, once per coordinate on the axes over which it is whole."""
    layout = type_.layout

    def coordinates(axes: Sequence[str]) -> list[dict[str, int]]:
        places = product(*(range(mesh.size(axis)) for axis in axes))
        return [dict(zip(axes, place, strict=True)) for place in places]

    def joined(fixed: Mapping[str, int]) -> Tensor:
        return assemble(lambda rank: parts[mesh.rank({**mesh.coordinates(rank), **fixed})], type_.shape, mesh, layout)

    whole = [axis for axis, _ in mesh.axes if layout.state(axis) == REPLICATED]
    for fixed in coordinates(whole):
        yield (
            torch.stack([joined({**fixed, **summed}) for summed in coordinates(layout.partial)])
            .sum(0)
            .to(parts[0].dtype)
        )


def equal(made: Tensor, wanted: Tensor) -> bool:
    """The same shape, element type and values; floating-point ones to 1e-10 of the largest."""
    if made.shape != wanted.shape or made.dtype != wanted.dtype:
        return False
    if wanted.is_complex():
        return equal(torch.view_as_real(made), torch.view_as_real(wanted))
    if not wanted.dtype.is_floating_point:
        return torch.equal(made, wanted)
    finite = wanted[wanted.isfinite()].abs()
    tolerance = TOLERANCE * max(1.0, float(finite.max()) if finite.numel() else 0.0)
    return torch.allclose(made, wanted, rtol=0.0, atol=tolerance, equal_nan=True)


WRONG: dict[str, Callable[[Rule], Rule]] = {
    "aten._softmax": lambda rule: replace(rule, operands=rule.results, whole=frozenset()),
    "aten.cumsum": lambda rule: replace(rule, operands=rule.results, whole=frozenset()),
    "aten.constant_pad_nd": lambda rule: replace(rule, operands=rule.results, whole=frozenset()),
    "aten.amax": lambda rule: replace(rule, whole=frozenset()),
    "aten.relu": lambda rule: replace(rule, linear=(frozenset({0}),)),
    "aten.add.Tensor": lambda rule: replace(rule, linear=(frozenset({0}),)),
    "aten.convolution_backward": lambda rule: replace(rule, reads=()),
}
"""Rules spoiled on purpose."""


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_found_out(name: str) -> None:
    refuted: list[int] = []

    @PROFILE
    @given(drawn(name))
    def look(case: Case) -> None:
        wholes = run_op(case.op, case.tensors)
        for laid in single_axes(case, WRONG[name](rule_of(case.op))):
            try:
                check(case, wholes, [laid])
            except (AssertionError, RuntimeError):
                refuted.append(1)

    look()
    assert refuted


# Uneven pieces.


def check_uneven(case: Case, wholes: Sequence[Tensor], rule: Rule, factor: str) -> None:
    """The factor in two contiguous pieces, the first one longer or shorter than the second."""
    size = rule.sizes[factor]
    for first in {size - size // 2, max(1, size // 3)}:
        pieces = [run_piece(case, rule, factor, 0, first), run_piece(case, rule, factor, first, size - first)]
        for index, (whole, dims) in enumerate(zip(wholes, rule.results, strict=True)):
            parts = [piece[index] for piece in pieces]
            if case.defined:
                for put_together in united(parts, dims, rule, factor, index):
                    assert equal(put_together, whole), (
                        f"result {index} by {factor} = {first} + {size - first}, rule {rule}"
                    )


def run_piece(case: Case, rule: Rule, factor: str, start: int, length: int) -> tuple[Tensor, ...]:
    """The op on the operands' pieces, its attributes adjusted to the shapes of the pieces."""
    tensors = [
        piece_of(t, dims, rule, factor, start, length) for t, dims in zip(case.flat(), rule.operands, strict=True)
    ]
    results = [
        Value(TensorType(result.type.dtype, piece_shape(result.type.shape, dims, rule, factor, length)))
        for result, dims in zip(case.op.results, rule.results, strict=True)
    ]
    function = annotated(case.op, [])
    values = [Value(TensorType(p.type.dtype, tuple(t.shape))) for p, t in zip(function.params, tensors, strict=True)]
    (op,) = function.ops
    new = refit(op, replace(op.with_operands(dict(zip(function.params, values, strict=True))), results=tuple(results)))
    return tuple(run_ops(Function("f", tuple(values), (new,), tuple(results)), tensors))


def place(dims: Dims, factor: str) -> tuple[int, int] | None:
    """The dim that contains the factor, and its place among the dim's factors."""
    return next(((dim, factors.index(factor)) for dim, factors in enumerate(dims) if factor in factors), None)


def piece_shape(shape: tuple[int, ...], dims: Dims, rule: Rule, factor: str, length: int) -> tuple[int, ...]:
    found = place(dims, factor)
    if found is None:
        return shape
    return tuple(size // rule.sizes[factor] * length if dim == found[0] else size for dim, size in enumerate(shape))


def piece_of(tensor: Tensor, dims: Dims, rule: Rule, factor: str, start: int, length: int) -> Tensor:
    found = place(dims, factor)
    if found is None:
        return tensor
    dim, at = found
    sizes = [rule.sizes[each] for each in dims[dim]]
    digits = tensor.reshape(*tensor.shape[:dim], *sizes, *tensor.shape[dim + 1 :])
    return digits.narrow(dim + at, start, length).flatten(dim, dim + len(sizes) - 1).contiguous()


def united(parts: Sequence[Tensor], dims: Dims, rule: Rule, factor: str, index: int) -> Iterator[Tensor]:
    """The whole result: joined along the factor, summed where it is summed over, or the same in both parts."""
    found = place(dims, factor)
    if found is None:
        read = any(place(rule.operands[i], factor) for i in rule.reads_of(index))
        yield from [parts[0] + parts[1]] if read else parts
        return
    dim, at = found
    sizes = [rule.sizes[each] for each in dims[dim]]
    sizes[at] = -1
    last = dim + len(sizes) - 1
    yield torch.cat([part.unflatten(dim, sizes) for part in parts], dim + at).flatten(dim, last)
