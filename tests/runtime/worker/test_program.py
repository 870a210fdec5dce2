"""Programs on real workers: collectives, loop axes, placement, random keys; compared with global tensors."""

from __future__ import annotations

import pytest
import torch

from moaic.ir.errors import Diagnostic
from moaic.ir.verify import load
from moaic.runtime.controller.accelerator import Accelerator
from moaic.runtime.controller.buffer import Buffer, whole
from moaic.runtime.interpreter import run_function
from moaic.runtime.rank_arrays import TOLERANCES
from tests.runtime.rings import Ring

SUMS = """// moai 1
mesh [{mesh}]
func @terms(%x: {dtype}[{n}, 8]) -> ({dtype}[{n}, 8] +a) {{
  %y = aten.mul.Tensor %x, %x : {dtype}[{n}, 8] +a
  return %y
}}
func @main(%x: {dtype}[{n}, 8] input "x")
    -> ({dtype}[{n}, 8], {dtype}[{n}{{a}}, 8], {dtype}[{n}, 8{{a}}], {dtype}[{n}, 8]) {{
  %y = call @terms %x : {dtype}[{n}, 8] +a
  %all = moai.all_reduce %y {{axis = "a"}} : {dtype}[{n}, 8]
  %rows = moai.reduce_scatter %y {{axis = "a"}} : {dtype}[{n}{{a}}, 8]
  %columns = moai.reduce_scatter %y {{axis = "a"}} : {dtype}[{n}, 8{{a}}]
  %first = moai.first %x {{axis = "a"}} : {dtype}[{n}, 8] +a
  %same = moai.all_reduce %first {{axis = "a"}} : {dtype}[{n}, 8]
  return %all, %rows, %columns, %same
}}
"""


def up(accelerator: Accelerator, tensor: torch.Tensor, dtype: str = "f32") -> Buffer:
    buffer = accelerator.buffer(dtype, tuple(tensor.shape))
    accelerator.upload(buffer, tensor)
    return buffer


def run(
    accelerator: Accelerator, text: str, *inputs: torch.Tensor, dtype: str = "f32", **more: object
) -> list[torch.Tensor]:
    """The results of a program, interpreted, on the inputs; those of i64 and of bool keep their type."""
    program = accelerator.load(text, compiled=False)
    kinds = {torch.int64: "i64", torch.bool: "bool"}
    buffers = [up(accelerator, tensor, kinds.get(tensor.dtype, dtype)) for tensor in inputs]
    main = accelerator.program(program)
    outputs = [accelerator.buffer(result.type.dtype, result.type.shape) for result in main.results]
    accelerator.run(program, buffers, outputs, **more)  # pyright: ignore[reportArgumentType]
    return [accelerator.download(whole(buffer)) for buffer in outputs]


@pytest.mark.parametrize(("mesh", "ranks"), [("a=4", 4), ("a=2", 2), ("b=2, a=2", 2), ("a=2, b=2", 2), ("a=1", 1)])
@pytest.mark.parametrize("n", [8, 40_000])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_sums(four: Accelerator, mesh: str, ranks: int, n: int, dtype: str) -> None:
    kind = torch.float32 if dtype == "f32" else torch.bfloat16
    x = torch.randn(n, 8).to(kind)
    text = SUMS.format(mesh=mesh, dtype=dtype, n=n)
    everything, rows, columns, same = run(four, text, x, dtype=dtype)
    # Equal terms: the sum in float32, rounded once, is exact for a power of two.
    assert torch.equal(everything, x * x * ranks)
    assert torch.equal(rows, everything)
    assert torch.equal(columns, everything)
    assert torch.equal(same, x)


MOVES = """// moai 1
mesh [a=2, b=2]
func @main(%x: f32[8{a}, 12, N{b}] input "x")
    -> (f32[8, 12, N], f32[8, 12{a}, N{b}], f32[8{a:2, b:1}, 12, N], f32[8{a, b}, 12, N]) {
  %0 = moai.all_gather %x {axis = "a"} : f32[8, 12, N{b}]
  %1 = moai.all_gather %0 {axis = "b"} : f32[8, 12, N]
  %2 = moai.all_to_all %x {axis = "a"} : f32[8, 12{a}, N{b}]
  %3 = moai.all_to_all %x {axis = "a"} : f32[8{a:2}, 12, N{b}]
  %4 = moai.all_to_all %3 {axis = "b"} : f32[8{a:2, b:1}, 12, N]
  %5 = moai.all_to_all %x {axis = "b"} : f32[8{a, b}, 12, N]
  return %1, %2, %4, %5
}
"""


@pytest.mark.parametrize("n", [2, 6000])
def test_moves_keep_the_value(four: Accelerator, n: int) -> None:
    x = torch.randn(8, 12, n)
    for got in run(four, MOVES.replace("N", str(n)), x):
        assert torch.equal(got, x)


RINGS = (
    Ring(2, 12, 12, causal=True),
    Ring(3, 12, 24, mask="looks"),
    Ring(3, 12, 12, causal=True, mask="numbers", value_width=3),
    Ring(2, 8, 8, causal=True, mask="looks", dtype="bf16"),
    Ring(4, 16, 16),
)


@pytest.mark.parametrize("ring", RINGS, ids=str)
def test_rings(four: Accelerator, ring: Ring) -> None:
    inputs = ring.inputs()
    expected = run_function(load(ring.text), "main", inputs)
    for got, want in zip(run(four, ring.text, *inputs, dtype=ring.dtype), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=TOLERANCES[got.dtype], atol=TOLERANCES[got.dtype])


TIME = """// moai 1
mesh [dp=2]
func @double(%x: f32[2{dp:1}, 3]) -> (f32[2{dp:1}, 3], f32[3] +dp) {
  %y = aten.mul.Tensor %x, _ {other = 2} : f32[2{dp:1}, 3]
  %s = aten.sum.dim_IntList %y {dim = [0]} : f32[3] +dp
  return %y, %s
}
func @main(%x: f32[4{dp}, 3] input "x") -> (f32[4{dp}, 3], f32[3]) {
  %x0 = moai.part %x {axis = "mb", index = 0, count = 2, dim = 0, stride = 1} : f32[2{dp:1}, 3]
  %y0, %s0 = call @double %x0 : f32[2{dp:1}, 3], f32[3] +dp
  %x1 = moai.part %x {axis = "mb", index = 1, count = 2, dim = 0, stride = 1} : f32[2{dp:1}, 3]
  %y1, %s1 = call @double %x1 : f32[2{dp:1}, 3], f32[3] +dp
  %s = moai.accumulate %s0, %s1 : f32[3] +dp
  %y = moai.join %y0, %y1 {dim = 0, stride = 1} : f32[4{dp}, 3]
  %sum = moai.all_reduce %s {axis = "dp"} : f32[3]
  return %y, %sum
}
"""


def test_steps_in_time(four: Accelerator) -> None:
    x = torch.arange(12.0).view(4, 3)
    y, total = run(four, TIME, x)
    assert torch.equal(y, 2 * x)
    assert torch.equal(total, (2 * x).sum(0))


ADDED = """// moai 1
mesh [dp=2]
func @part(%x: f32[16{dp}, 4], %ids: i64[16{dp}], %product: f32[4, 4] +dp, %rows: f32[9, 4] +dp, %sum: f32[4] +dp)
    -> (f32[4, 4] +dp, f32[9, 4] +dp, f32[4] +dp) {
  %t = aten.permute %x {dims = [1, 0]} : f32[4, 16{dp}]
  %p = aten.mm %t, %x : f32[4, 4] +dp
  %product_1 = moai.add_to %product, %p : f32[4, 4] +dp
  %r = aten.embedding_dense_backward %x, %ids {num_weights = 9, padding_idx = 3, scale_grad_by_freq = false}
      : f32[9, 4] +dp
  %rows_1 = moai.add_to %rows, %r : f32[9, 4] +dp
  %s = aten.sum.dim_IntList %x {dim = [0]} : f32[4] +dp
  %sum_1 = moai.add_to %sum, %s : f32[4] +dp
  return %product_1, %rows_1, %sum_1
}
func @main(%x: f32[16{dp}, 4] input "x", %ids: i64[16{dp}] input "ids", %given: f32[4] input "given")
    -> (f32[4, 4], f32[9, 4], f32[4], f32[4]) {
  %start = moai.first %given {axis = "dp"} : f32[4] +dp
  %p0 = moai.accumulate _, _ : f32[4, 4] +dp
  %r0 = moai.accumulate _, _ : f32[9, 4] +dp
  %p1, %r1, %s1 = call @part %x, %ids, %p0, %r0, %start : f32[4, 4] +dp, f32[9, 4] +dp, f32[4] +dp
  %p2, %r2, %s2 = call @part %x, %ids, %p1, %r1, %s1 : f32[4, 4] +dp, f32[9, 4] +dp, f32[4] +dp
  %product = moai.all_reduce %p2 {axis = "dp"} : f32[4, 4]
  %rows = moai.all_reduce %r2 {axis = "dp"} : f32[9, 4]
  %sum = moai.all_reduce %s2 {axis = "dp"} : f32[4]
  %once = moai.all_reduce %s1 {axis = "dp"} : f32[4]
  return %product, %rows, %sum, %once
}
"""


@pytest.mark.parametrize("compiled", [False, True])
def test_functions_add_to_sums(two: Accelerator, compiled: bool) -> None:
    """Sums that others still read, such as what the program was given, stay as they are."""
    x, ids, given = torch.randn(16, 4), torch.arange(16) % 9, torch.randn(4)
    program = two.load(ADDED, compiled=compiled)
    buffers = [up(two, x), up(two, ids, "i64"), up(two, given)]
    outputs = [two.buffer("f32", shape) for shape in ((4, 4), (9, 4), (4,), (4,))]
    for _ in range(2):
        two.run(program, buffers, outputs)
    got = [two.download(whole(buffer)) for buffer in outputs]
    rows = torch.zeros(9, 4).index_add(0, ids, x)
    rows[3] = 0
    torch.testing.assert_close(got[0], 2 * x.T @ x)
    torch.testing.assert_close(got[1], 2 * rows)
    torch.testing.assert_close(got[2], given + 2 * x.sum(0))
    torch.testing.assert_close(got[3], given + x.sum(0))
    assert torch.equal(two.download(whole(buffers[2])), given)


ALIASES = """// moai 1
mesh [dp=2]
func @same(%x: f32[4, 3]) -> (f32[12], f32[12]) {
  %v = aten.view %x {size = [12]} : f32[12]
  return %v, %v
}
func @main(%x: f32[4, 3] input "x") -> (f32[12], f32[12], f32[4, 3], f32[12]) {
  %v, %w = call @same %x : f32[12], f32[12]
  %s = moai.accumulate %v, %w : f32[12]
  return %v, %w, %x, %s
}
"""


def test_results_share_no_memory(two: Accelerator) -> None:
    program = two.load(ALIASES, compiled=False)
    x = torch.arange(12.0).view(4, 3)
    given = up(two, x)
    outputs = [two.buffer("f32", shape) for shape in ((12,), (12,), (4, 3), (12,))]
    two.run(program, [given], outputs)
    for buffer in outputs:
        two.launch("aten.add_.Scalar", (whole(buffer), 1), {}, ())
    expected = [x.view(12) + 1, x.view(12) + 1, x + 1, 2 * x.view(12) + 1]
    for buffer, value in zip(outputs, expected, strict=True):
        assert torch.equal(two.download(whole(buffer)), value)
    assert torch.equal(two.download(whole(given)), x)


RANDOM = """// moai 1
mesh [MESH]
func @draw(%k: i64[2]) -> (f32[8SPLIT, 6]) {
  %k1 = moai.fold_key %k {instance = 3} : i64[2]
  %r = moai.rand %k1 : f32[8SPLIT, 6]
  return %r
}
func @main(%k: i64[2] key) -> (f32[8SPLIT, 6]) {
  %r = call @draw %k : f32[8SPLIT, 6]
  return %r
}
"""


def test_random_numbers_do_not_depend_on_the_mesh(four: Accelerator) -> None:
    draws: list[torch.Tensor] = []
    for mesh, split in (("dp=1", ""), ("dp=2", "{dp}"), ("dp=4", "{dp}"), ("dp=2, tp=2", "{dp, tp}")):
        text = RANDOM.replace("MESH", mesh).replace("SPLIT", split)
        draws.extend(run(four, text, key=(7, 1)))
        assert not torch.equal(draws[-1], run(four, text, key=(7, 2))[0])
    assert all(torch.equal(draw, draws[0]) for draw in draws)
    assert draws[0].unique().numel() == draws[0].numel()


ROWS = """// moai 1
mesh [dp=2]
func @main(%x: f32[4{dp}, 2] input "x") -> (f32[4{dp}, 2]) {
  return %x
}
"""

ONE = """// moai 1
mesh []
func @main(%x: f32[4, 2] input "x") -> (f32[4, 2]) {
  return %x
}
"""


def test_inputs_come_from_wherever_they_rest(four: Accelerator) -> None:
    rows, one = four.load(ROWS, compiled=False), four.load(ONE, compiled=False)
    x = torch.arange(8.0).view(4, 2)
    buffer = up(four, x)
    split, alone, again = (four.buffer("f32", (4, 2)) for _ in range(3))
    four.run(rows, [buffer], [split])
    born = buffer.place
    assert born is not None
    assert not born.is_whole
    four.run(one, [buffer], [alone])
    assert buffer.place == born
    four.run(rows, [alone], [again])
    assert alone.place is not None
    assert alone.place.mesh.ranks == 1
    four.run(one, [buffer], [None], rest=[buffer])
    assert buffer.place == alone.place
    four.run(rows, [buffer], [None], rest=[buffer])
    for each in (buffer, split, alone, again):
        assert torch.equal(four.download(whole(each)), x)


def test_a_program_for_more_workers_than_there_are_is_refused(two: Accelerator) -> None:
    with pytest.raises(Diagnostic, match="for 4 workers, and there are 2"):
        two.load(ROWS.replace("dp=2", "dp=4"))


def test_a_program_is_given_what_it_takes(two: Accelerator) -> None:
    rows = two.load(ROWS, compiled=False)
    with pytest.raises(ValueError, match="1 inputs and 1 outputs, not 0 and 1"):
        two.run(rows, [], [two.buffer("f32", (4, 2))])
    key = two.load(RANDOM.replace("MESH", "dp=2").replace("SPLIT", "{dp}"), compiled=False)
    with pytest.raises(ValueError, match="needs a random key"):
        two.run(key, [], [two.buffer("f32", (8, 6))])


def test_compiled_functions_give_what_interpreted_ones_do(two: Accelerator) -> None:
    x = torch.randn(4, 3)
    compiled = two.load(TIME)
    outputs = [two.buffer("f32", (4, 3)), two.buffer("f32", (3,))]
    two.run(compiled, [up(two, x)], outputs)
    for got, expected in zip(outputs, run(two, TIME, x), strict=True):
        assert torch.equal(two.download(whole(got)), expected)
    statistics = two.stats()
    assert all(worker.programs[compiled].compile["double"] > 0 for worker in statistics.workers)
    assert statistics.pss > 0
