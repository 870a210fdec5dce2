from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.ir.layout import REPLICATED, State, splits_dim
from moaic.ir.verify import load, verify
from moaic.passes.perf.numbers import MeasureSource, Number
from moaic.passes.sharding.axis import Axis
from moaic.passes.sharding.data_parallel import shard_batch
from moaic.passes.sharding.solver.costs import CostCoefficients, LayoutCosts, coefficients_of
from moaic.passes.sharding.solver.problem import problem
from moaic.passes.sharding.solver.strategy_sets import find_strategies
from moaic.passes.sharding.tensor_parallel import shard_tensors
from moaic.passes.transforms.to_float64 import promote
from moaic.runtime.interpreter import run_function, run_ranks
from tests.passes.steps import machine

CLUSTER = CostCoefficients(flops=200e12, memory=2e12, link=300e9, latency=10e-6, local=5e-6)
"""Fast devices on fast links."""

EAGER = CostCoefficients(latency=0.0, local=0.0)
"""Splits and converts even what is small."""


def mlp(batch: int, sequence: int, width: int, hidden: int) -> Module:
    """x + relu(g x a) b, squared and summed, with the gradients of a, b and g."""
    b, s, d, f, t = batch, sequence, width, hidden, batch * sequence
    return load(f"""// moai 1
func @step(
    %x: f32[{b}, {s}, {d}] input "x", %g: f32[{d}] param "g", %a: f32[{d}, {f}] param "a", %b: f32[{f}, {d}] param "b"
) -> (f32[] output "loss", f32[{d}, {f}] grad "a", f32[{f}, {d}] grad "b", f32[{d}] grad "g") {{
  %n = aten.mul.Tensor %x, %g : f32[{b}, {s}, {d}]
  %rows = aten.view %n {{size = [{t}, {d}]}} : f32[{t}, {d}]
  %h = aten.mm %rows, %a : f32[{t}, {f}]
  %r = aten.relu %h : f32[{t}, {f}]
  %o = aten.mm %r, %b : f32[{t}, {d}]
  %v = aten.view %o {{size = [{b}, {s}, {d}]}} : f32[{b}, {s}, {d}]
  %y = aten.add.Tensor %x, %v : f32[{b}, {s}, {d}]
  %q = aten.mul.Tensor %y, %y : f32[{b}, {s}, {d}]
  %l = aten.sum %q : f32[]
  %dy = aten.mul.Tensor %y, _ {{other = 2.0}} : f32[{b}, {s}, {d}]
  %do = aten.view %dy {{size = [{t}, {d}]}} : f32[{t}, {d}]
  %rt = aten.permute %r {{dims = [1, 0]}} : f32[{f}, {t}]
  %db = aten.mm %rt, %do : f32[{f}, {d}]
  %bt = aten.permute %b {{dims = [1, 0]}} : f32[{d}, {f}]
  %dr = aten.mm %do, %bt : f32[{t}, {f}]
  %dh = aten.threshold_backward %dr, %h {{threshold = 0}} : f32[{t}, {f}]
  %nt = aten.permute %rows {{dims = [1, 0]}} : f32[{d}, {t}]
  %da = aten.mm %nt, %dh : f32[{d}, {f}]
  %at = aten.permute %a {{dims = [1, 0]}} : f32[{f}, {d}]
  %drows = aten.mm %dh, %at : f32[{t}, {d}]
  %dn = aten.view %drows {{size = [{b}, {s}, {d}]}} : f32[{b}, {s}, {d}]
  %dng = aten.mul.Tensor %dn, %x : f32[{b}, {s}, {d}]
  %dg = aten.sum.dim_IntList %dng {{dim = [0, 1]}} : f32[{d}]
  return %l, %da, %db, %dg
}}
""")


def layers(count: int, width: int, hidden: int) -> Module:
    """Calls of one function, each with its own two matrices."""
    d, f = width, hidden
    params = ", ".join(f'%a{i}: f32[{d}, {f}] param "a{i}", %b{i}: f32[{f}, {d}] param "b{i}"' for i in range(count))
    calls = "\n".join(f"  %h{i + 1} = call @layer %h{i}, %a{i}, %b{i} : f32[2, 8, {d}]" for i in range(count))
    return load(f"""// moai 1
func @layer(%x: f32[2, 8, {d}], %a: f32[{d}, {f}], %b: f32[{f}, {d}]) -> (f32[2, 8, {d}]) {{
  %t = aten.tanh %x : f32[2, 8, {d}]
  %rows = aten.view %t {{size = [16, {d}]}} : f32[16, {d}]
  %h = aten.mm %rows, %a : f32[16, {f}]
  %r = aten.relu %h : f32[16, {f}]
  %o = aten.mm %r, %b : f32[16, {d}]
  %v = aten.view %o {{size = [2, 8, {d}]}} : f32[2, 8, {d}]
  %y = aten.add.Tensor %x, %v : f32[2, 8, {d}]
  return %y
}}
func @step(%h0: f32[2, 8, {d}] input "x", {params}) -> (f32[2, 8, {d}] output "y") {{
{calls}
  return %h{count}
}}
""")


def attention(heads: int, groups: int, size: int = 4, width: int = 16, sequence: int = 8) -> Module:
    """Projections of something split, attention in which `heads` share `groups` keys and values, and its projection."""
    b, s, d, h, g, e = 2, sequence, width, heads, groups, size
    t, n = b * s, heads // groups
    heads_of, stats_of = f"f32[{b}, {h}, {s}, {e}]", f"f32[{b}, {h}, {s}]"

    def projected(name: str, count: int) -> str:
        return f"""
  %{name}rows = aten.view %x2 {{size = [{t}, {d}]}} : f32[{t}, {d}]
  %{name}t = aten.permute %w{name} {{dims = [1, 0]}} : f32[{d}, {count * e}]
  %{name}mm = aten.mm %{name}rows, %{name}t : f32[{t}, {count * e}]
  %{name}v = aten.view %{name}mm {{size = [{b}, {s}, {count}, {e}]}} : f32[{b}, {s}, {count}, {e}]
  %{name} = aten.permute %{name}v {{dims = [0, 2, 1, 3]}} : f32[{b}, {count}, {s}, {e}]"""

    def repeated(name: str) -> str:
        return f"""
  %{name}1 = aten.view %{name} {{size = [{b}, {g}, 1, {s}, {e}]}} : f32[{b}, {g}, 1, {s}, {e}]
  %{name}2 = aten.expand %{name}1 {{size = [{b}, {g}, {n}, {s}, {e}]}} : f32[{b}, {g}, {n}, {s}, {e}]
  %{name}3 = aten.view %{name}2 {{size = [{b}, {h}, {s}, {e}]}} : f32[{b}, {h}, {s}, {e}]"""

    return load(f"""// moai 1
func @step(
    %x: f32[{b}, {s}, {d}] input "x", %wi: f32[{d}, {d}] param "wi", %wq: f32[{h * e}, {d}] param "wq",
    %wk: f32[{g * e}, {d}] param "wk", %wv: f32[{g * e}, {d}] param "wv", %wo: f32[{h * e}, {d}] param "wo"
) -> (f32[{b}, {s}, {d}] output "y") {{
  %xrows = aten.view %x {{size = [{t}, {d}]}} : f32[{t}, {d}]
  %mixed = aten.mm %xrows, %wi : f32[{t}, {d}]
  %mixed3 = aten.view %mixed {{size = [{b}, {s}, {d}]}} : f32[{b}, {s}, {d}]
  %x1 = aten.softplus %mixed3 : f32[{b}, {s}, {d}]
  %x2 = aten.cumsum %x1 {{dim = 2}} : f32[{b}, {s}, {d}]
{projected("q", h)}{projected("k", g)}{projected("v", g)}{repeated("k")}{repeated("v")}
  %out, %stats = moai.sdpa %q, %k3, %v3, _ {{is_causal = true}} : {heads_of}, {stats_of} in "layers.*.attention"
  %outp = aten.permute %out {{dims = [0, 2, 1, 3]}} : f32[{b}, {s}, {h}, {e}]
  %outr = aten.view %outp {{size = [{t}, {h * e}]}} : f32[{t}, {h * e}]
  %o = aten.mm %outr, %wo : f32[{t}, {d}]
  %ov = aten.view %o {{size = [{b}, {s}, {d}]}} : f32[{b}, {s}, {d}]
  %y = aten.add.Tensor %x2, %ov : f32[{b}, {s}, {d}]
  return %y
}}
""")


def put_in(module: Module, n: int, prices: CostCoefficients = EAGER) -> Module:
    split = shard_tensors(module, Axis("tp", n), prices).module
    verify(split)
    return split


def moves(module: Module) -> Counter[str]:
    """Collectives over the axis, in all functions."""
    ops = (op for function in module.functions for op in function.ops)
    return Counter(op.name.removeprefix("moai.") for op in ops if op.attrs.get("axis") == "tp")


def moved(module: Module, kind: str) -> list[str]:
    """Names of what one kind of collective makes in the main function, vectors and scalars left out."""
    made = (op.results[0] for op in module.main.ops if op.name == f"moai.{kind}")
    return [value.name for value in made if len(value.type.shape) > 1]


def states(module: Module) -> dict[str, State]:
    """How parameters of the main function lie over the axis, by label."""
    main = module.main
    return {main.param_role(i).label: value.type.layout.state("tp") for i, value in enumerate(main.params)}


def random_inputs(module: Module) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [value.type.shape for value in module.main.params]
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def prove(split: Module, whole: Module) -> None:
    """Both compute the same on the same random numbers."""
    inputs = random_inputs(whole)
    results, wanted = run_ranks(promote(split), inputs), run_function(promote(whole), whole.main.name, inputs)
    for result, other in zip(results, wanted, strict=True):
        torch.testing.assert_close(result, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("n", [2, 4])
def test_an_mlp_is_split_as_people_do_it(n: int) -> None:
    split = put_in(mlp(8, 512, 1024, 4096), n, CostCoefficients())
    assert states(split) == {"x": REPLICATED, "g": REPLICATED, "a": (1, 4096 // n), "b": (0, 4096 // n)}
    made = {value.name: value.type.layout.state("tp") for value in split.main.values()}
    assert made["h"] == made["r"] == (1, 4096 // n)
    assert made["y"] == made["q"] != REPLICATED
    assert moved(split, "all_gather") == ["dy"]
    assert moved(split, "reduce_scatter")[0] == "o"


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(
    "prices",
    [
        EAGER,
        CLUSTER,
        CostCoefficients(),
        CostCoefficients(latency=0.0, local=0.0, held=0.0, unsharded=0.0),
        CostCoefficients(latency=0.0, local=0.0, flops=1e6, memory=1e6),
        CostCoefficients(saved=0.0, link=1e6),
    ],
)
def test_every_price_gives_the_same_numbers(prices: CostCoefficients, n: int) -> None:
    for whole in (mlp(2, 8, 8, 16), attention(4, 2), layers(3, 8, 16)):
        prove(put_in(whole, n, prices), whole)


def test_beside_the_batch_split_over_another_axis() -> None:
    for whole in (mlp(4, 8, 8, 16), layers(2, 8, 16)):
        prove(put_in(shard_batch(whole, Axis("dp", 2)).module, 2), whole)


def test_gradients_lie_as_their_parameters() -> None:
    main = put_in(mlp(2, 8, 8, 16), 2).main
    lie = {main.param_role(i).label: value.type for i, value in enumerate(main.params)}
    grads = {main.result_role(i).label: value.type for i, value in enumerate(main.results) if i}
    assert grads == {label: lie[label] for label in grads}


def test_results_are_no_pending_sums() -> None:
    main = put_in(mlp(2, 8, 8, 16), 2, CostCoefficients(latency=0.0, local=0.0, held=0.0, unsharded=0.0)).main
    assert all(not value.type.layout.partial for value in main.results)


def test_the_batch_is_left_alone() -> None:
    split = put_in(mlp(4, 8, 8, 16), 2)
    values = [value for value in split.main.values() if value.type.shape == (4, 8, 8)]
    assert not any(splits_dim(value.type.layout.state("tp"), 0) for value in values)


def test_projections_of_one_value_share_a_gather() -> None:
    split = put_in(attention(heads=32, groups=8, size=128, width=4096, sequence=2048), 8, CLUSTER)
    assert states(split) == {
        "x": REPLICATED,
        "wi": states(split)["wi"],
        "wq": (0, 512),
        "wk": (0, 128),
        "wv": (0, 128),
        "wo": (0, 512),
    }
    assert moved(split, "all_gather") == ["x2"]
    made = {value.name: value.type.layout.state("tp") for value in split.main.values()}
    assert made["x1"] == made["y"] == (1, 2048 // 8), "what needs the width whole is split along the sequence"


def test_more_ranks_than_groups() -> None:
    whole = attention(heads=4, groups=2)
    split = put_in(whole, 4)
    sdpa = next(op for op in split.main.ops if op.name == "moai.sdpa")
    assert [value.type.layout.state("tp") for value in sdpa.inputs()] == [(1, 1)] * 3
    prove(split, whole)


def test_a_slow_link_leaves_the_axis_unused_if_nothing_asks_for_it() -> None:
    split = put_in(mlp(2, 8, 8, 16), 2, CostCoefficients(link=1e3, held=0.0, unsharded=0.0))
    assert not moves(split)
    assert set(states(split).values()) == {REPLICATED}


def test_an_axis_that_is_asked_for_is_used_however_small_the_model() -> None:
    lie = states(put_in(mlp(2, 8, 8, 16), 2, CostCoefficients()))
    assert lie["a"] != REPLICATED
    assert lie["b"] != REPLICATED


def test_one_function_for_all_its_calls() -> None:
    split = put_in(layers(5, 8, 16), 2)
    assert [function.name for function in split.functions] == ["layer", "step"]
    lie = states(split)
    assert all(lie[f"{a}{i}"] == lie[f"{a}{j}"] for a in "ab" for i, j in pairwise(range(5)))


def test_more_layers_are_no_larger_problem() -> None:
    def choices(count: int) -> int:
        module, axis = layers(count, 8, 16), Axis("tp", 2)
        return len(problem(module, find_strategies(module, axis), LayoutCosts(EAGER, module.mesh, 2)).choices)

    assert choices(3) == choices(30)


@pytest.mark.parametrize(
    ("n", "heads", "message"),
    [
        (3, 4, "tp=3 divides neither the 4 heads nor the rows of layers.*.attention; tp=2 or tp=4 would"),
        (4, 6, "tp=4 divides neither the 6 heads nor the rows of layers.*.attention; tp=2, tp=3 or tp=6 would"),
        (2, 1, "tp=2 divides neither the 1 heads nor the rows of layers.*.attention; no other size would"),
    ],
)
def test_heads_and_rows_that_do_not_divide(n: int, heads: int, message: str) -> None:
    with pytest.raises(Diagnostic, match=re.escape(message)):
        shard_tensors(attention(heads, 1, width=12, sequence=7), Axis("tp", n), CostCoefficients())


def test_where_heads_do_not_divide_rows_are_split() -> None:
    whole = attention(6, 1)
    split = put_in(whole, 4)
    sdpa = next(op for op in split.main.ops if op.name == "moai.sdpa")
    assert [value.type.layout.state("tp") for value in sdpa.inputs()] == [(2, 2), REPLICATED, REPLICATED]
    prove(split, whole)


def test_seven_heads_on_two_ranks() -> None:
    whole = attention(7, 1)
    prove(put_in(whole, 2), whole)


def test_nothing_to_split() -> None:
    with pytest.raises(Diagnostic, match=r"tp=5 cannot split any of the 6 matrix products of @step"):
        shard_tensors(mlp(5, 8, 8, 16), Axis("tp", 5), CostCoefficients())


def test_prices_are_those_of_the_machine_in_steps_of_two() -> None:
    known = coefficients_of(machine())
    assert (known.flops, known.memory, known.link) == (2.0**30, 2.0**30, 2.0**29)
    assert known.latency == 2.0**-10
    slower = replace(machine(), bandwidth=Number(0.9e9, MeasureSource.MEASURED))
    assert coefficients_of(slower) == known
    assert coefficients_of(replace(machine(), links={})).link == CostCoefficients().link
