"""Sharded vocabularies: embedding, logits and loss stay sharded by cost alone, and results are exact."""

from __future__ import annotations

from math import prod

import pytest
import torch

from moaic.ir.graph import Value
from moaic.ir.layout import REPLICATED, State, splits_dim
from moaic.ir.verify import load
from moaic.passes.lowering.plan import Plan
from moaic.passes.sharding.axis import Axis
from moaic.passes.sharding.solver.costs import CostCoefficients
from moaic.passes.sharding.tensor_parallel import shard_tensors
from moaic.passes.transforms.outline import outline
from moaic.passes.transforms.to_float64 import promote
from moaic.runtime.interpreter import run_function, run_ranks
from tests.passes.models import LENGTH, MODELS, ROWS, VOCABULARY, WIDTH, config, proof

EAGER = CostCoefficients(latency=0.0, local=0.0)


def moved(plan: Plan) -> list[Value]:
    """What is sent over tp."""
    ops = (op for function in plan.module.functions for op in function.ops)
    sent = (op for op in ops if op.name.startswith("moai.") and op.attrs.get("axis") == "tp")
    return [value for op in sent if op.name != "moai.shard" for value in (*op.inputs(), *op.results)]


def state(value: Value) -> State:
    return value.type.layout.state("tp")


@pytest.mark.parametrize("plan", ["tp=2", "tp=4", "dp=2,tp=2", "tp=2,micro_batches=2"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_never_gathered(name: str, plan: str) -> None:
    made = proof(name).prove(config(plan))
    logits = next(v for op in made.module.main.ops if op.name == "aten.mm" for v in op.results)
    assert VOCABULARY in logits.type.shape
    assert splits_dim(state(logits), 1), "the vocabulary is split"
    assert not [value for value in moved(made) if prod(value.type.shape) >= prod(logits.type.shape)]


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_a_table_that_is_also_the_head_is_looked_up_in_parts(name: str) -> None:
    main = proof(name).prove(config("tp=2")).module.main
    look_up = next(op for op in main.ops if op.name == "aten.embedding" and VOCABULARY in next(op.inputs()).type.shape)
    table, ids = look_up.inputs()
    assert state(table) == (0, VOCABULARY // 2)
    assert state(ids) == REPLICATED
    assert look_up.results[0].type.layout.partial == ("tp",)


def test_norms_and_residuals_are_split_along_the_sequence() -> None:
    """What the plan of a GPT-2 says: gathered before the projections, scattered sums after them."""
    split = shard_tensors(outline(proof("gpt2").step.module), Axis("tp", 2), EAGER).module
    layer = next(function for function in split.functions if function.name == "h.fwd")
    hidden = (ROWS, LENGTH, WIDTH)
    norms = [op.results[0] for op in layer.ops if op.name == "aten.native_layer_norm"]
    residuals = [
        op.results[0] for op in layer.ops if op.name == "aten.add.Tensor" and op.results[0].type.shape == hidden
    ]
    assert [state(value) for value in (*norms, *residuals)] == [(1, LENGTH // 2)] * 4
    sent = [op.name for op in layer.ops if op.attrs.get("axis") == "tp" and op.name != "moai.shard"]
    assert sent == ["moai.all_gather", "moai.reduce_scatter", "moai.all_gather", "moai.reduce_scatter"]


@pytest.mark.parametrize(
    "op",
    [
        "%y = aten._softmax %u {dim = 1, half_to_float = false} : f32[6, 8]",
        "%y = aten._softmax %u {dim = -1, half_to_float = false} : f32[6, 8]",
        "%y = aten._log_softmax %u {dim = 1, half_to_float = false} : f32[6, 8]",
        "%y = aten.logsumexp %u {dim = [1], keepdim = true} : f32[6, 1]",
        "%y = aten.logsumexp %u {dim = [1]} : f32[6]",
        "%y = aten.amax %u {dim = [1]} : f32[6]",
        "%y = aten.amin %u {dim = [1], keepdim = true} : f32[6, 1]",
    ],
)
@pytest.mark.parametrize("n", [2, 4])
def test_softmaxes_over_a_split_dim(op: str, n: int) -> None:
    result = op.rpartition(" : ")[2]
    whole = load(f"""// moai 1
func @step(%x: f32[6, 4] input "x", %w: f32[4, 8] param "w") -> ({result} output "y") {{
  %u = aten.mm %x, %w : f32[6, 8]
  {op}
  return %y
}}
""")
    split = shard_tensors(whole, Axis("tp", n), EAGER).module
    gathered = [v for made in split.main.ops if made.name == "moai.all_gather" for v in made.results]
    assert not any(value.type.shape == (6, 8) for value in gathered)
    inputs = [torch.randn(value.type.shape, dtype=torch.float64) * 30 for value in whole.main.params]
    (made,) = run_ranks(promote(split), inputs)
    (wanted,) = run_function(promote(whole), "step", inputs)
    torch.testing.assert_close(made, wanted, rtol=1e-12, atol=1e-12)


def test_a_softmax_that_cannot_be_split_stays_one_op() -> None:
    whole = load("""// moai 1
func @step(%x: f32[6, 4] input "x", %w: f32[4, 7] param "w") -> (f32[6, 7] output "y") {
  %u = aten.mm %x, %w : f32[6, 7]
  %y = aten._softmax %u {dim = 1, half_to_float = false} : f32[6, 7]
  return %y
}
""")
    names = [op.name for op in shard_tensors(whole, Axis("tp", 2), EAGER).module.main.ops]
    assert "aten._softmax" in names
    assert "aten.exp" not in names
