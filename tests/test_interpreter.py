from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moaic.ir.graph import Attr, Function, Module, Op, Value
from moaic.ir.layout import Layout, Mesh, Split
from moaic.ir.parser import parse
from moaic.ir.types import TensorType
from moaic.runtime.codegen.compile import compile_function, compile_functions
from moaic.runtime.codegen.lower_to_fx import ComputeFunction, run_ops
from moaic.runtime.interpreter import run_function, run_ranks
from moaic.runtime.rank_arrays import gather, join_parts, scatter, take_part

# Raised by PyTorch's own modules when Inductor is imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

MESHES = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(
    lambda sizes: Mesh(tuple((f"a{i}", size) for i, size in enumerate(sizes)))
)


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[TensorType, Mesh]:
    """A tensor of up to two dims, its axes put on random dims in random nesting, or pending, or nowhere."""
    mesh = draw(MESHES)
    sizes = [1, 1]
    splits: list[Split] = []
    pending: list[str] = []
    for axis, ranks in draw(st.permutations(mesh.axes)):
        where = draw(st.sampled_from(["dim0", "dim1", "pending", "whole"]))
        if where == "pending":
            pending.append(axis)
        elif where != "whole":
            dim = int(where[-1])
            stride = sizes[dim] * draw(st.integers(1, 2))
            splits.append(Split(axis, dim, stride))
            sizes[dim] = stride * ranks
    shape = tuple(size * draw(st.integers(1, 3)) for size in sizes)
    splits.sort(key=lambda split: (split.dim, -split.stride))
    return TensorType("f64", shape, Layout(tuple(splits), tuple(sorted(pending)))), mesh


@given(laid_out())
def test_gather_undoes_scatter(case: tuple[TensorType, Mesh]) -> None:
    kind, mesh = case
    whole = torch.arange(kind.elements(), dtype=torch.float64).reshape(kind.shape)
    parts = scatter(whole, kind, mesh)
    assert {tuple(part.shape) for part in parts} == {kind.local_shape(mesh)}
    assert torch.equal(gather(parts, kind, mesh), whole)


@given(laid_out())
def test_a_digit_says_which_rank_holds_an_index(case: tuple[TensorType, Mesh]) -> None:
    kind, mesh = case
    for split in kind.layout.splits:
        index = torch.arange(kind.shape[split.dim], dtype=torch.float64)
        index = index.reshape([-1 if dim == split.dim else 1 for dim in range(2)]).expand(kind.shape)
        for rank, part in enumerate(scatter(index, TensorType("f64", kind.shape, Layout(kind.layout.splits)), mesh)):
            digit = (part // split.stride) % mesh.size(split.axis)
            assert bool((digit == mesh.coordinates(rank)[split.axis]).all())


def test_ranks_that_should_agree_must() -> None:
    with pytest.raises(AssertionError, match="replicas of ranks 0 and 1 of an axis differ"):
        gather([torch.zeros(2), torch.ones(2)], TensorType("f32", (2,)), Mesh((("dp", 2),)))


def module(text: str) -> Module:
    return parse("// moai 1\n" + text)


def same(text: str, *inputs: Tensor) -> list[Tensor]:
    """Runs a module whole and on its ranks; both must agree. Returns the results."""
    parsed = module(text)
    whole = run_function(parsed, parsed.main.name, inputs)
    for one, other in zip(whole, run_ranks(parsed, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    return whole


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(prod(shape)))


def test_a_sharded_product_is_the_product() -> None:
    x, w = numbers(8, 6), numbers(6, 4)
    (y,) = same(
        """
        mesh [dp=2, tp=2]
        func @f(%x: f64[8{dp}, 6{tp}], %w: f64[6{tp}, 4]) -> (f64[8{dp}, 4]) {
          %0 = aten.mm %x, %w : f64[8{dp}, 4] +tp
          %1 = moai.all_reduce %0 {axis = "tp"} : f64[8{dp}, 4]
          return %1
        }
        """,
        x,
        w,
    )
    torch.testing.assert_close(y, x @ w)


def test_every_collective() -> None:
    (y,) = same(
        """
        mesh [dp=2, tp=3]
        func @f(%x: f64[12{dp}, 6]) -> (f64[12, 6]) {
          %0 = moai.shard %x {axis = "tp"} : f64[12{dp, tp}, 6]
          %1 = moai.all_to_all %0 {axis = "tp"} : f64[12{dp}, 6{tp}]
          %2 = moai.all_gather %1 {axis = "tp"} : f64[12{dp}, 6]
          %3 = moai.first %2 {axis = "tp"} : f64[12{dp}, 6] +tp
          %4 = moai.reduce_scatter %3 {axis = "tp"} : f64[12{dp, tp}, 6]
          %5 = moai.all_gather %4 {axis = "dp"} : f64[12{tp:2}, 6]
          %6 = moai.all_gather %5 {axis = "tp"} : f64[12, 6]
          return %6
        }
        """,
        numbers(12, 6),
    )
    assert torch.equal(y, numbers(12, 6))


def test_views_keep_digits() -> None:
    same(
        """
        mesh [dp=2, tp=2]
        func @f(%x: f64[4{dp}, 6{tp}, 2]) -> (f64[24{dp, tp:3}, 2]) {
          %0 = aten.view %x {size = [24, 2]} : f64[24{dp, tp:3}, 2]
          return %0
        }
        """,
        numbers(4, 6, 2),
    )


def test_random_numbers_do_not_depend_on_the_layout() -> None:
    (drawn,) = same(
        """
        mesh [dp=2, tp=2]
        func @draw(%k: i64[2] key) -> (f32[4{dp}, 12{tp:3}, 2]) {
          %0 = moai.fold_key %k {instance = 3} : i64[2]
          %1 = moai.rand %0 : f32[4{dp}, 12{tp:3}, 2]
          return %1
        }
        func @f(%k: i64[2] key) -> (f32[4{dp}, 12{tp:3}, 2]) {
          %0 = call @draw %k : f32[4{dp}, 12{tp:3}, 2]
          return %0
        }
        """,
        torch.tensor([5, 6]),
    )
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert drawn.unique().numel() == drawn.numel()


def test_micro_batches_accumulate_to_the_whole() -> None:
    text = """
        func @half(%x: f64[4, 6], %w: f64[6, 2]) -> (f64[4, 2], f64[2]) {
          %0 = aten.mm %x, %w : f64[4, 2]
          %1 = aten.sum.dim_IntList %0 {dim = [0]} : f64[2]
          return %0, %1
        }
        func @f(%x: f64[8, 6], %w: f64[6, 2]) -> (f64[8, 2], f64[2]) {
          %0 = moai.part %x {axis = "mb", index = 0, count = 2, dim = 0, stride = 2} : f64[4, 6]
          %y0, %s0 = call @half %0, %w : f64[4, 2], f64[2]
          %1 = moai.part %x {axis = "mb", index = 1, count = 2, dim = 0, stride = 2} : f64[4, 6]
          %y1, %s1 = call @half %1, %w : f64[4, 2], f64[2]
          %s = moai.accumulate %s0, %s1 : f64[2]
          %y = moai.join %y0, %y1 {dim = 0, stride = 2} : f64[8, 2]
          return %y, %s
        }
        """
    x, w = numbers(8, 6), numbers(6, 2)
    y, total = same(text, x, w)
    torch.testing.assert_close(y, x @ w)
    torch.testing.assert_close(total, (x @ w).sum(0))


def test_a_program_cuts_what_each_rank_holds() -> None:
    text = """
        mesh [dp=2]
        func @f(%x: f64[8{dp}]) -> (f64[8{dp}]) {
          %0 = moai.part %x {axis = "mb", index = 0, count = 2, dim = 0, stride = 2} : f64[4{dp}]
          %1 = moai.part %x {axis = "mb", index = 1, count = 2, dim = 0, stride = 2} : f64[4{dp}]
          %2 = moai.join %0, %1 {dim = 0, stride = 2} : f64[8{dp}]
          return %2
        }
        """
    (y,) = run_ranks(module(text), [torch.arange(8.0, dtype=torch.float64)])
    assert y.tolist() == list(range(8))


# Compute functions, interpreted and compiled.


def function(name: str, inputs: list[TensorType], outputs: list[TensorType], **attrs: Attr) -> Function:
    params, results = tuple(map(Value, inputs)), tuple(map(Value, outputs))
    return Function("f", params, (Op(name, params, results, attrs),), results)


def attention(
    dtype: str, mask: TensorType | None, width: int = 8, *, is_causal: bool = False, backward: bool = False
) -> Function:
    q, k, v = (TensorType(dtype, shape) for shape in ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, width)))
    out, stats = TensorType(dtype, (2, 3, 5, width)), TensorType("f64" if dtype == "f64" else "f32", (2, 3, 5))
    masks = [] if mask is None else [mask]
    attrs = {"is_causal": is_causal, "scale": 0.3}
    if backward:
        return function("moai.sdpa_backward", [out, q, k, v, out, stats, *masks], [q, k, v], **attrs)
    return function("moai.sdpa", [q, k, v, *masks], [out, stats], **attrs)


MASKS = {
    "none": None,
    "bool": TensorType("bool", (2, 1, 5, 7)),
    "added": TensorType("f32", (5, 7)),
}


def drawn(kind: TensorType) -> Tensor:
    if kind.dtype != "bool":
        return numbers(*kind.shape).to(
            getattr(torch, {"f64": "float64", "bf16": "bfloat16"}.get(kind.dtype, "float32"))
        )
    looks = numbers(*kind.shape) > 0
    looks[..., 0] = True
    return looks


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("width", [8, 4])
def test_attention_has_the_gradients_of_the_formula(dtype: str, mask: str, width: int) -> None:
    kind = MASKS[mask]
    kind = TensorType(dtype, kind.shape) if mask == "added" and kind else kind
    forward, backward = (attention(dtype, kind, width, backward=side) for side in (False, True))
    inputs = [drawn(param.type) for param in forward.params]
    q, k, v, *masks = (t.double() if t.is_floating_point() else t for t in inputs)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    added = masks[0] if masks else None
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, added, scale=0.3)
    out, stats = run_ops(forward, inputs)
    tolerance = {"f32": 1e-5, "f64": 1e-12, "bf16": 5e-2}[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    grad = torch.ones_like(out)
    grads = run_ops(backward, [grad, *inputs[:3], out, stats, *inputs[3:]])
    for one, other in zip(grads, torch.autograd.grad(expected, leaves, grad.double()), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


def test_a_row_that_looks_at_nothing_gives_zeros() -> None:
    f = attention("f32", MASKS["bool"], width=4)
    inputs = [drawn(param.type) for param in f.params]
    inputs[3][:, :, 2] = False
    out, _ = run_ops(f, inputs)
    assert bool((out[:, :, 2] == 0).all())


COMPILED = {
    "attention": attention("f32", MASKS["added"]),
    "attention_backward": attention("f32", MASKS["added"], is_causal=False, backward=True),
    "attention_by_formula": attention("f32", None, width=4, is_causal=True),
    "rand": function("moai.rand", [TensorType("i64", (2,))], [TensorType("f32", (3, 5))]),
    "transposed": function("aten.permute", [TensorType("f32", (3, 5))], [TensorType("f32", (5, 3))], dims=(1, 0)),
}


@pytest.fixture(scope="module")
def compiled_together() -> dict[str, ComputeFunction]:
    return dict(zip(COMPILED, compile_functions(list(COMPILED.values()), compiled=True), strict=True))


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_is_interpreted(compiled_together: dict[str, ComputeFunction], name: str) -> None:
    f = COMPILED[name]
    inputs = [torch.tensor([2, 3]) if p.type.dtype == "i64" else drawn(p.type) for p in f.params]
    plain, fast = (run(list(inputs)) for run in (compile_function(f, compiled=False), compiled_together[name]))
    for one, other in zip(plain, fast, strict=True):
        assert other.is_contiguous()
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_compiled_copy_is_a_copy() -> None:
    x = Value(TensorType("f32", (3,)))
    y, z, own = (Value(x.type) for _ in range(3))
    ops = (Op("aten.neg", (x,), (y,)), Op("aten.clone", (y,), (z,)), Op("aten.clone", (x,), (own,)))
    given = torch.ones(3)
    results = compile_function(Function("f", (x,), ops, (y, z, own)), compiled=True)([given])
    assert len({tensor.data_ptr() for tensor in (given, *results)}) == 4


def test_compiled_adds_to_a_sum_where_it_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where CI is set, which has Inductor refuse what it would otherwise call PyTorch for."""
    from torch._inductor.lowering import lowerings

    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.delitem(lowerings, torch.ops.aten.addmm_.default, raising=False)
    total, product, result = (Value(TensorType("f32", (3, 4))) for _ in range(3))
    x, w = (Value(TensorType("f32", shape)) for shape in ((3, 5), (5, 4)))
    ops = (Op("aten.mm", (x, w), (product,)), Op("moai.add_to", (total, product), (result,)))
    run = compile_function(Function("f", (total, x, w), ops, (result,)), compiled=True)
    sums = torch.ones(3, 4)
    (found,) = run([sums, numbers(3, 5).float(), numbers(5, 4).float()])
    assert found.data_ptr() == sums.data_ptr()
    torch.testing.assert_close(found, 1 + numbers(3, 5).float() @ numbers(5, 4).float())


def test_compiled_takes_any_strides() -> None:
    f = COMPILED["transposed"]
    x = numbers(5, 3).float().t()
    (y,) = compile_function(f, compiled=True)([x])
    assert torch.equal(y, x.t())


def test_uniform_numbers_are_uniform() -> None:
    f = function("moai.rand", [TensorType("i64", (2,))], [TensorType("f32", (1 << 16,))])
    (one,), (other,) = (run_ops(f, [torch.tensor(key)]) for key in ([1, 2], [1, 3]))
    counts = torch.histc(one, 64, 0, 1)
    assert ((counts - 1024) ** 2 / 1024).sum() < 2 * 64
    for x, y in ((one[1:], one[:-1]), (one, other)):
        assert abs(torch.corrcoef(torch.stack([x, y]))[0, 1]) < 0.02


@pytest.mark.parametrize(("dim", "stride", "shape"), [(1, 1, (0, 4)), (1, 3, (0, 12)), (0, 2, (8, 0)), (0, 1, (0, 4))])
def test_splits_of_nothing_are_put_together_again(dim: int, stride: int, shape: tuple[int, ...]) -> None:
    whole = torch.zeros(shape)
    parts = [take_part(whole, dim, stride, 2, at) for at in range(2)]
    assert parts[0].shape[dim] == shape[dim] // 2
    assert join_parts(parts, dim, stride).shape == whole.shape
