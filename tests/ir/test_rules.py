"""What rules say of ops, the strategies that follow from them, and the factors of views."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from moaic.ir.graph import Op
from moaic.ir.layout import PARTIAL, REPLICATED, Layout, Mesh, Sharded, State, is_uneven
from moaic.ir.ops import flops_of, rule_of
from moaic.ir.parser import parse
from moaic.ir.rules import Dims, Rule, Strategy, fits, refine, rule_from_text
from moaic.ir.types import TensorType
from moaic.runtime.protocol.tensor_parts import assemble, cut, local_part

PROFILE = settings(max_examples=100, derandomize=True, database=None, deadline=None)

SIZES = st.sampled_from((2, 3, 4, 6))
Shape = tuple[int, ...]


def one_op(params: str, op: str) -> Op:
    return parse(f"// moai 1\nfunc @f({params}) -> () {{\n  {op}\n  return\n}}\n").main.ops[0]


# What rules say, as text.

MATRICES = "%x: f32[4, 6], %w: f32[6, 8]"
ROPE = "%x: f32[2, 4, 8, 6]"
ATTENTION = "%q: f32[2, 4, 8, 6], %k: f32[2, 4, 9, 6], %v: f32[2, 4, 9, 5]"


@pytest.mark.parametrize(
    ("params", "op", "rule", "linear"),
    [
        (MATRICES, "%y = aten.mm %x, %w : f32[4, 8]", "m k, k n -> m n", [{0}, {1}]),
        ("%x: f32[4, 6], %b: f32[6]", "%y = aten.add.Tensor %x, %b : f32[4, 6]", "d0 d1, d1 -> d0 d1", [{0, 1}]),
        ("%x: f32[4]", "%y = aten.add.Tensor %x, _ {other = 1} : f32[4]", "d0 -> d0", []),
        ("%x: f32[4]", "%y = aten.mul.Tensor %x, _ {other = 2} : f32[4]", "d0 -> d0", [{0}]),
        ("%x: f32[4]", "%y = aten.div.Tensor _, %x {self = 1} : f32[4]", "d0 -> d0", []),
        ("%x: f32[4, 1]", "%y = aten.expand %x {size = [3, 4, 6]} : f32[3, 4, 6]", "d1 1 -> d0 d1 d2", [{0}]),
        ("%x: bf16[4]", '%y = aten._to_copy %x {dtype = "f32"} : f32[4]', "d0 -> d0", [{0}]),
        ("%x: f32[4]", '%y = aten._to_copy %x {dtype = "bf16"} : bf16[4]', "d0 -> d0", []),
        ("%x: f16[4]", '%y = aten._to_copy %x {dtype = "bf16"} : bf16[4]', "d0 -> d0", []),
        (
            "%c: bool[4], %x: f32[4], %y: f32[4]",
            "%z = aten.where.self %c, %x, %y : f32[4]",
            "d0, d0, d0 -> d0",
            [{1, 2}],
        ),
        ("%x: f32[8, 6, 4]", "%y = aten.view %x {size = [48, 4]} : f32[48, 4]", "f2 f1 f0 -> (f2 f1) f0", [{0}]),
        (
            "%x: f32[8, 6]",
            "%y = aten.view %x {size = [8, 1, 2, 3]} : f32[8, 1, 2, 3]",
            "f2 (f1 f0) -> f2 1 f1 f0",
            [{0}],
        ),
        ("%x: f32[4, 6]", "%y = aten.view %x {size = [6, 4]} : f32[6, 4]", "w0! w1! -> w2! w3!", [{0}]),
        ("%x: f32[4, 8, 0]", "%y = aten.view %x {size = [32, 0]} : f32[32, 0]", "f1 f0 e0! -> (f1 f0) e1!", [{0}]),
        (
            "%x: f32[4, 8, 0]",
            "%y = aten.view %x {size = [4, 8, 2, 0]} : f32[4, 8, 2, 0]",
            "f1 f0 e0! -> f1 f0 e1! e2!",
            [{0}],
        ),
        ("%x: f32[4, 6]", "%y = aten.sum.dim_IntList %x {dim = [1]} : f32[4]", "d0 d1 -> d0", [{0}]),
        ("%x: f32[4, 6]", "%y = aten.amax %x {dim = [1], keepdim = true} : f32[4, 1]", "d0 d1! -> d0 1", []),
        ("%x: f32[4, 6]", "%y = aten._softmax %x {dim = 1} : f32[4, 6]", "d0 l0d1! -> d0 r0d1!", []),
        (
            ROPE,
            "%y = aten.slice.Tensor %x {dim = 3, start = 3, end = 6} : f32[2, 4, 8, 3]",
            "d0 d1 d2 (p! r) -> d0 d1 d2 r",
            [{0}],
        ),
        (
            ROPE,
            "%y = aten.slice.Tensor %x {dim = 3, end = 4} : f32[2, 4, 8, 4]",
            "d0 d1 d2 l0d3! -> d0 d1 d2 r0d3!",
            [{0}],
        ),
        ("%x: f32[4, 6]", "%y = aten.cat [%x, %x] {dim = 1} : f32[4, 12]", "d0 r, d0 r -> d0 (p! r)", [{0, 1}]),
        ("%w: f32[9, 6], %i: i64[4, 8]", "%y = aten.embedding %w, %i : f32[4, 8, 6]", "v d, i0 i1 -> i0 i1 d", [{0}]),
        (
            "%g: f32[4, 8, 6], %i: i64[4, 8]",
            "%y = aten.embedding_dense_backward %g, %i {num_weights = 9} : f32[9, 6]",
            "i0 i1 d, i0 i1 -> v d",
            [{0}],
        ),
        (
            "%x: f32[4, 9], %i: i64[4, 3]",
            "%y = aten.gather %x, %i {dim = 1} : f32[4, 3]",
            "d0 v, d0 g -> d0 g",
            [{0}],
        ),
        (
            "%x: f32[9, 6], %i: i64[4, 1], %j: i64[8]",
            "%y = aten.index.Tensor %x, [%i, %j] : f32[4, 8]",
            "v0 v1, i0 1, i1 -> i0 i1",
            [{0}],
        ),
        (
            "%x: f32[2, 9, 6], %i: i64[4]",
            "%y = aten.index.Tensor %x, [_, %i] : f32[2, 4, 6]",
            "d0 v1 d2, i0 -> d0 i0 d2",
            [{0}],
        ),
        (
            "%x: f32[4, 6, 9, 9], %w: f32[8, 6, 3, 3]",
            "%y = aten.convolution %x, %w, _ {stride = [1, 1], padding = [0, 0], dilation = [1, 1], "
            "transposed = false, output_padding = [0, 0], groups = 1} : f32[4, 8, 7, 7]",
            "n i x0! x1!, o i k0! k1! -> n o y0! y1!",
            [{0}, {1}],
        ),
        (
            f"{ATTENTION}, %m: bool[2, 1, 8, 9]",
            "%o, %l = moai.sdpa %q, %k, %v, %m {is_causal = false, scale = 0.5} : f32[2, 4, 8, 5], f32[2, 4, 8]",
            "b h q d!, b h k! d!, b h k! e!, b 1 q k! -> b h q e!, b h q",
            [],
        ),
        ("%k: i64[2]", "%r = moai.rand %k : f32[8, 6]", "key! -> d0 d1", []),
        ("", '%y = aten.full {size = [8], fill_value = 0.0, dtype = "f32"} : f32[8]', " -> d0", []),
        ("%x: f32[8]", "%y = aten.never_heard_of %x : f32[8]", "w0! -> w1!", []),
    ],
)
def test_what_rules_say(params: str, op: str, rule: str, linear: list[set[int]]) -> None:
    made = rule_of(one_op(params, op))
    assert str(made) == rule
    assert [set(operands) for operands in made.linear] == linear


def test_a_factor_only_on_the_left_is_summed() -> None:
    rule = rule_of(one_op(MATRICES, "%y = aten.mm %x, %w : f32[4, 8]"))
    assert rule.by_factor("k", 1, 3) == Strategy((Sharded(1, 1), Sharded(0, 1)), (PARTIAL,))
    assert rule.by_factor("m", 2, 2) == Strategy((Sharded(0, 2), REPLICATED), (Sharded(0, 2),))
    assert rule.by_factor("m", 1, 3) is None


def test_each_result_sums_over_what_it_reads() -> None:
    op = one_op(
        "%g: f32[4, 8, 7], %x: f32[4, 6, 9], %w: f32[8, 6, 3]",
        "%a, %b, %c = aten.convolution_backward %g, %x, %w {bias_sizes = [8], stride = [1], padding = [0], "
        "dilation = [1], transposed = false, output_padding = [0], groups = 1, output_mask = [true, true, true]} "
        ": f32[4, 6, 9], f32[8, 6, 3], f32[8]",
    )
    rule = rule_of(op)
    assert rule.by_factor("i", 1, 2) == Strategy(
        (REPLICATED, Sharded(1, 1), Sharded(1, 1)), (Sharded(1, 1), Sharded(1, 1), REPLICATED)
    )
    assert rule.by_factor("n", 2, 2) == Strategy(
        (Sharded(0, 2), Sharded(0, 2), REPLICATED), (Sharded(0, 2), PARTIAL, PARTIAL)
    )
    assert rule.by_factor("o", 4, 2) is None
    without_bias = replace(op, results=op.results[:2], attrs={**op.attrs, "output_mask": (True, True, False)})
    assert rule_of(without_bias).by_factor("o", 4, 2) == Strategy(
        (Sharded(1, 4), REPLICATED, Sharded(0, 4)), (PARTIAL, Sharded(0, 4))
    )


def test_sizes_of_groups_are_found_in_dims_of_their_own() -> None:
    x, y = TensorType("f32", (12, 5)), TensorType("f32", (3, 4, 5))
    rule = rule_from_text("(b s) d -> b s d", [x], [y])
    assert rule.sizes == {"b": 3, "s": 4, "d": 5}
    assert rule.by_factor("s", 2, 2) == Strategy((Sharded(0, 2),), (Sharded(1, 2),))
    assert rule.by_factor("b", 1, 3) == Strategy((Sharded(0, 4),), (Sharded(0, 1),))


def test_nothing_of_an_empty_tensor_is_split() -> None:
    rule = rule_of(one_op("%x: f32[0, 6], %w: f32[6, 8]", "%y = aten.mm %x, %w : f32[0, 8]"))
    assert rule.by_factor("m", 1, 2) is None
    assert len(list(rule.contiguous(2))) == 2


def test_work_of_heavy_ops() -> None:
    assert flops_of(one_op(MATRICES, "%y = aten.mm %x, %w : f32[4, 8]")) == 2 * 4 * 6 * 8
    attention = "%o, %l = moai.sdpa %q, %k, %v, _ {is_causal = false, scale = 0.5} : f32[2, 4, 8, 5], f32[2, 4, 8]"
    assert flops_of(one_op(ATTENTION, attention)) == 2 * 2 * 4 * 8 * 9 * (6 + 5)
    convolution = (
        "%y = aten.convolution %x, %w, _ {{stride = [1], padding = [0], dilation = [1], transposed = {0}, "
        "output_padding = [0], groups = 1}} : f32[4, 8, {1}]"
    )
    forward = one_op("%x: f32[4, 6, 9], %w: f32[8, 6, 3]", convolution.format("false", 7))
    transposed = one_op("%x: f32[4, 6, 7], %w: f32[6, 8, 3]", convolution.format("true", 9))
    assert flops_of(forward) == flops_of(transposed) == 2 * 4 * 6 * 8 * 7 * 3


# Strategies and states are two ways to say the same.


@st.composite
def rules(draw: DrawFn) -> Rule:
    """A rule of a few tensors, each of some of the factors, in any order and grouped in any way."""
    names = [f"f{i}" for i in range(draw(st.integers(1, 4)))]
    sizes = {name: draw(SIZES) for name in names}

    def dims() -> Dims:
        chosen = draw(st.permutations(names))[: draw(st.integers(0, len(names)))]
        grouped: list[tuple[str, ...]] = []
        for name in chosen:
            if grouped and draw(st.booleans()):
                grouped[-1] = (*grouped[-1], name)
            else:
                grouped += [()] * draw(st.integers(0, 1)) + [(name,)]
        return tuple(grouped)

    operands, results = (tuple(dims() for _ in range(draw(st.integers(1, 2)))) for _ in range(2))
    return Rule(operands, results, sizes, frozenset(draw(st.sets(st.sampled_from(names), max_size=1))))


def shape_of(dims: Dims, rule: Rule) -> Shape:
    return tuple(prod(rule.sizes[factor] for factor in factors) for factors in dims)


def stays_apart(rule: Rule, factor: str) -> bool:
    """Whether a factor is a dim of its own in every operand that has it, and in every result."""
    sides = (*rule.operands, *rule.results)
    is_merged = any(factor in factors and len(factors) > 1 for dims in sides for factors in dims)
    return not is_merged and all((factor,) in dims for dims in rule.results)


@PROFILE
@given(rules(), st.sampled_from((2, 3)))
def test_following_a_state_finds_the_factor(rule: Rule, n: int) -> None:
    for factor, size in rule.sizes.items():
        for stride in range(1, size + 1):
            strategy = rule.by_factor(factor, stride, n)
            can_be_uneven = is_uneven(size, stride, n) and stays_apart(rule, factor)
            assert (strategy is None) == (factor in rule.whole or (size % (stride * n) != 0 and not can_be_uneven))
            if strategy is None:
                continue
            states = (*strategy.operands, *strategy.results)
            for dims, state in zip((*rule.operands, *rule.results), states, strict=True):
                followed = rule.following(dims, state, n)
                assert followed == (strategy if any(factor in factors for factors in dims) else None)


@PROFILE
@given(rules(), st.sampled_from((2, 3)))
def test_what_follows_a_state_keeps_it(rule: Rule, n: int) -> None:
    for index, dims in enumerate(rule.operands):
        for dim, size in enumerate(shape_of(dims, rule)):
            for stride in range(1, size + 1):
                state: State = Sharded(dim, stride)
                strategy = rule.following(dims, state, n)
                if strategy is not None:
                    assert strategy.operands[index] == state
                    assert size % (stride * n) == 0 or (is_uneven(size, stride, n) and len(dims[dim]) == 1)


@PROFILE
@given(rules(), st.sampled_from((2, 3)))
def test_contiguous_strategies_are_those_of_whole_chunks(rule: Rule, n: int) -> None:
    free = [factor for factor, size in rule.sizes.items() if factor not in rule.whole and size % n == 0]
    assert list(rule.contiguous(n)) == [rule.by_factor(factor, rule.sizes[factor] // n, n) for factor in free]


def test_neither_pending_nor_whole_is_followed() -> None:
    rule = rule_of(one_op(MATRICES, "%y = aten.mm %x, %w : f32[4, 8]"))
    assert rule.following(rule.operands[0], PARTIAL, 2) is None
    assert rule.following(rule.operands[0], REPLICATED, 2) is None


def test_a_linear_set_carries_pending_sums() -> None:
    rule = Rule(((("a",),),) * 3, ((("a",),),) * 2, {"a": 2}, reads=(frozenset({0, 1}), frozenset({2})))
    assert rule.by_linearity(frozenset({0, 1})) == Strategy((PARTIAL, PARTIAL, REPLICATED), (PARTIAL, REPLICATED))
    assert rule.replicated() == Strategy((REPLICATED,) * 3, (REPLICATED,) * 2)


# Views.


@st.composite
def grouped(draw: DrawFn, sizes: Shape) -> Shape:
    """A shape with as many elements: neighbors of `sizes` multiplied together, ones strewn in."""
    shape: list[int] = []
    for at, size in enumerate(sizes):
        if at and draw(st.booleans()):
            shape[-1] *= size
        else:
            shape += [1] * draw(st.integers(0, 1)) + [size]
    return (*shape, *[1] * draw(st.integers(0, 1)))


def factor_order(dims: Dims) -> list[str]:
    return [factor for factors in dims for factor in factors]


@PROFILE
@given(st.lists(SIZES, max_size=4), st.data())
def test_views_that_only_group_are_free(sizes: list[int], data: st.DataObject) -> None:
    left, right = (data.draw(grouped(tuple(sizes))) for _ in range(2))
    left_dims, right_dims, factors, whole = refine(left, right)
    assert not whole
    assert factor_order(left_dims) == factor_order(right_dims) == [*factors][::-1]
    rule = Rule((left_dims,), (right_dims,), factors)
    assert (shape_of(left_dims, rule), shape_of(right_dims, rule)) == (left, right)


@PROFILE
@given(st.lists(SIZES, min_size=1, max_size=4), st.data())
def test_views_move_no_element_to_another_rank(sizes: list[int], data: st.DataObject) -> None:
    """Also where shapes do not divide each other: what is left free is still split alike on both sides."""
    left = data.draw(grouped(tuple(sizes)))
    right = data.draw(grouped(tuple(data.draw(st.permutations(sizes)))))
    left_dims, right_dims, factors, whole = refine(left, right)
    rule = Rule((left_dims,), (right_dims,), factors, whole)
    assert (shape_of(left_dims, rule), shape_of(right_dims, rule)) == (left, right)
    elements = torch.arange(prod(left))
    for n in (2, 3):
        for strategy in rule.contiguous(n):
            (dim, stride), (other_dim, other_stride) = split(strategy.operands[0]), split(strategy.results[0])
            for rank in range(n):
                one = cut(elements.reshape(left), dim, stride, n, rank)
                other = cut(elements.reshape(right), other_dim, other_stride, n, rank)
                assert torch.equal(one.flatten(), other.flatten())


def split(state: State) -> tuple[int, int]:
    assert isinstance(state, Sharded)
    return state


@PROFILE
@given(st.lists(SIZES, min_size=1, max_size=4), st.data())
def test_views_refine_alike_in_both_directions(sizes: list[int], data: st.DataObject) -> None:
    left = data.draw(grouped(tuple(sizes)))
    right = data.draw(grouped(tuple(data.draw(st.permutations(sizes)))))
    there, back = Rule(*pair(refine(left, right))), Rule(*pair(refine(right, left)))
    forward = {(strategy.operands, strategy.results) for strategy in there.contiguous(2)}
    assert forward == {(strategy.results, strategy.operands) for strategy in back.contiguous(2)}


def pair(
    refined: tuple[Dims, Dims, dict[str, int], frozenset[str]],
) -> tuple[tuple[Dims], tuple[Dims], dict[str, int], frozenset[str]]:
    left, right, sizes, whole = refined
    return (left,), (right,), sizes, whole


# Two axes on one dim.


@PROFILE
@given(st.sampled_from((4, 6, 8, 12, 24)), st.sampled_from((2, 3)), st.sampled_from((2, 3)), st.data())
def test_what_fits_can_be_taken_apart_and_joined(size: int, n: int, m: int, data: st.DataObject) -> None:
    mesh = Mesh((("a", n), ("b", m)))
    first, second = (data.draw(st.integers(1, size)) for _ in range(2))
    assume(size % (first * n) == 0)
    kind = TensorType("i64", (size,), Layout().with_state("a", Sharded(0, first)))
    digits = size % (second * m) == 0 and (first % (second * m) == 0 or second % (first * n) == 0)
    assert fits(kind, "b", Sharded(0, second), mesh) == digits
    assert fits(kind, "b", PARTIAL, mesh)
    assert fits(kind, "b", REPLICATED, mesh)
    if digits:
        layout = kind.layout.with_state("b", Sharded(0, second))
        whole = torch.arange(size)
        assert torch.equal(assemble(lambda rank: local_part(whole, mesh, layout, rank), (size,), mesh, layout), whole)
