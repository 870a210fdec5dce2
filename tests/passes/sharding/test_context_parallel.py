"""The axis `cp`: the sequence sharded, attention by gathered keys, by an exchange of rows for heads, or in a ring."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module, Op
from moaic.ir.layout import REPLICATED, Sharded, State
from moaic.ir.ring_attention import is_ring
from moaic.ir.verify import load, verify
from moaic.passes.config import Request
from moaic.passes.estimate.memory import fused_functions, memory_of
from moaic.passes.sharding.axis import Axis
from moaic.passes.sharding.context_parallel import shard_sequence
from moaic.passes.sharding.solver.costs import CostCoefficients
from moaic.passes.sharding.tensor_parallel import shard_tensors
from moaic.planner.candidates import candidates
from moaic.planner.search import Selection, search
from moaic.planner.worker import InProcessPool
from tests.exact.example import IGNORED, Answer, Batch
from tests.exact.models import llama, sizes
from tests.passes.models import LENGTH, Proof, config, proof, tokens
from tests.passes.sharding.test_tensor_parallel import attention, prove
from tests.passes.steps import dense, machine

EAGER = CostCoefficients(latency=0.0, local=0.0)
SLOW = CostCoefficients(latency=0.0, local=0.0, flops=1e6)
"""Work is dear, so that none is done in vain."""


def states(op: Op) -> list[State]:
    return [value.type.layout.state("cp") for value in op.inputs()]


def found(module: Module, name: str) -> list[Op]:
    return [op for function in module.functions for op in function.ops if op.name == name]


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("llama", "cp=2"),
        ("llama", "cp=4"),
        ("qwen2", "cp=2"),
        ("gpt2", "cp=2"),
        ("llama", "dp=2,cp=2"),
        ("llama", "cp=2,micro_batches=2"),
        ("qwen2", "cp=2,tp=2"),
        ("qwen2", "dp=2,cp=2,distribute_param=use"),
        ("gpt2", "cp=2,tp=2,micro_batches=2"),
    ],
)
def test_a_split_sequence_is_exact(name: str, plan: str) -> None:
    made = proof(name).prove(config(plan)).module
    n = config(plan).cp
    hidden = [op for op in found(made, "aten.mm") if op.loc.side == "forward"]
    rows = [states(op)[0] for op in hidden]
    assert all(isinstance(each, Sharded) and each.stride == LENGTH // n for each in rows), (
        "every product of rows is split by tokens"
    )


def test_keys_and_values_are_gathered_for_a_part_of_the_rows() -> None:
    made = proof("llama").builder.build(config("cp=2")).module
    (forward,) = found(made, "moai.sdpa")
    assert states(forward) == [(2, LENGTH // 2), REPLICATED, REPLICATED, (2, LENGTH // 2)]
    (backward,) = found(made, "moai.sdpa_backward")
    assert [value.type.layout.partial for value in backward.results] == [(), ("cp",), ("cp",)]
    assert len(found(made, "moai.reduce_scatter")) == 2, "the gradients of keys and of values"


@pytest.mark.parametrize(("heads", "groups", "n"), [(4, 2, 2), (4, 2, 4), (8, 8, 2)])
def test_rows_are_exchanged_for_heads_where_that_costs_less(heads: int, groups: int, n: int) -> None:
    whole = attention(heads, groups)
    split = shard_sequence(whole, Axis("cp", n), SLOW).module
    verify(split)
    (op,) = found(split, "moai.sdpa")
    assert states(op) == [(1, heads // n)] * 3, "a causal mask that is not spelled out is half of the work"
    assert len(found(split, "moai.all_to_all")) == 4
    prove(split, whole)


@pytest.mark.parametrize("prices", [EAGER, CostCoefficients(), CostCoefficients(link=1e6)])
def test_a_causal_flag_becomes_the_mask_of_the_rows(prices: CostCoefficients) -> None:
    """Three heads cannot be exchanged for rows."""
    whole = attention(3, 1)
    split = shard_sequence(whole, Axis("cp", 2), prices).module
    (op,) = found(split, "moai.sdpa")
    # In blocks or in stripes, which cost the same here.
    assert states(op) in ([(2, 4), REPLICATED, REPLICATED], [(2, 1), REPLICATED, REPLICATED])
    prove(split, whole)


def test_what_has_no_sequence() -> None:
    with pytest.raises(Diagnostic, match=re.escape("cp=2 splits the sequence, and @step has none")):
        shard_sequence(dense(), Axis("cp", 2), CostCoefficients())


def test_a_sequence_that_does_not_divide() -> None:
    with pytest.raises(Diagnostic, match=re.escape("cp=3 does not divide a sequence of 8; cp=2, cp=4 or cp=8 would")):
        shard_sequence(attention(4, 2), Axis("cp", 3), CostCoefficients())


def test_candidates_split_short_sequences_only_where_rows_are_few() -> None:
    step = proof("llama").step.module
    assert {config.cp for config in candidates(step, 4, Request())} == {1}
    assert {config.cp for config in candidates(step, 16, Request())} == {1, 2, 4, 8, 16}
    assert {config.cp for config in candidates(step, 4, Request(cp=2))} == {2}
    with pytest.raises(Diagnostic, match="cp=8 needs 8 workers, there are 4"):
        candidates(step, 4, Request(cp=8))


def test_heads_that_another_axis_has_split_are_named() -> None:
    split = shard_sequence(attention(8, 8), Axis("cp", 2), SLOW).module
    with pytest.raises(Diagnostic, match=r"tp=16 cannot split the 8 heads of layers.* once more: cp splits them"):
        shard_tensors(split, Axis("tp", 16), CostCoefficients())


def rings(module: Module) -> list[Op]:
    return [op for function in module.functions for op in function.ops if is_ring(op)]


FAR = CostCoefficients(latency=1e-3)
"""To begin something takes long."""

NARROW = CostCoefficients(latency=0.0, link=1e6)
"""To send something takes long."""


@pytest.mark.parametrize(
    ("heads", "n", "prices", "goes_round"),
    [(3, 2, CostCoefficients(), True), (3, 4, EAGER, True), (4, 2, FAR, True), (4, 4, NARROW, False)],
)
def test_what_is_not_gathered_goes_the_cheaper_way(
    heads: int, n: int, prices: CostCoefficients, goes_round: bool
) -> None:
    whole = attention(heads, heads)
    split = shard_sequence(whole, Axis("cp", n), prices, gather_keys=False).module
    verify(split)
    assert bool(rings(split)) == goes_round
    if goes_round:
        assert not found(split, "moai.sdpa")
        assert not found(split, "moai.all_to_all")
    else:
        assert states(found(split, "moai.sdpa")[0]) == [(1, heads // n)] * 3
    prove(split, whole)


@pytest.mark.parametrize("prices", [EAGER, CostCoefficients(), CostCoefficients(link=1e6), FAR])
def test_a_ring_that_costs_as_much_as_gathers_is_left(prices: CostCoefficients) -> None:
    assert not rings(shard_sequence(attention(3, 1), Axis("cp", 2), prices).module)


def test_a_ring_is_taken_where_its_stripes_save_what_a_mask_does_in_vain() -> None:
    whole = attention(3, 3)
    split = shard_sequence(whole, Axis("cp", 2), SLOW).module
    assert [op.attrs["stripes"] for op in rings(split)] == [2]
    prove(split, whole)


ACROSS = """// moai 1
func @step(%q: f32[1, 3, 6, 4] input "q", %k: f32[1, 3, KEYS, 4] input "k") -> (f32[1, 3, 6, 4] output "y") {
  %y, %l = moai.sdpa %q, %k, %k, _ {is_causal = CAUSAL} : f32[1, 3, 6, 4], f32[1, 3, 6] in "decoder"
  return %y
}
"""


@pytest.mark.parametrize(("keys", "causal"), [("5", "false"), ("4", "true")])
def test_attention_that_falls_into_no_blocks(keys: str, causal: str) -> None:
    step = load(ACROSS.replace("KEYS", keys).replace("CAUSAL", causal))
    shard_sequence(step, Axis("cp", 2), CostCoefficients())
    with pytest.raises(Diagnostic, match="cp=2 with gather_keys=false cannot shard attention of decoder: neither"):
        shard_sequence(step, Axis("cp", 2), CostCoefficients(), gather_keys=False)


def few(seed: int, rows: int) -> Batch:
    batch = tokens(seed, rows)
    labels = batch["labels"]
    return {**batch, "input_ids": batch["input_ids"] % 64, "labels": labels.where(labels == IGNORED, labels % 64)}


@cache
def three_heads() -> Proof:
    """A Llama whose heads neither two nor four ranks can share."""
    wide = {"num_attention_heads": 3, "num_key_value_heads": 3}
    return Proof(lambda: llama(**sizes(24, 24, 64, LENGTH) | wide), few)


class Flagged(nn.Module):
    """Attention with a causal flag, as people write it who need no other mask."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(64, 24), nn.Embedding(LENGTH, 24)
        self.packed, self.joined = nn.Linear(24, 3 * 24), nn.Linear(24, 24)
        self.head = nn.Linear(24, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Answer:
        x: Tensor = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        query, key, value = (part.unflatten(2, (3, 8)).transpose(1, 2) for part in self.packed(x).chunk(3, 2))
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        logits: Tensor = self.head(x + self.joined(seen.transpose(1, 2).flatten(2)))
        return Answer(cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits)


def unmasked(seed: int, rows: int) -> Batch:
    return {name: tensor for name, tensor in few(seed, rows).items() if name != "attention_mask"}


@pytest.mark.parametrize(
    "plan", ["cp=2", "dp=2,cp=2,micro_batches=2", pytest.param("cp=4,tp=3", marks=pytest.mark.exact)]
)
def test_a_causal_flag_has_the_sequence_lie_in_stripes(plan: str) -> None:
    made = Proof(Flagged, unmasked).prove(config(f"{plan},gather_keys=false")).module
    assert {op.attrs.get("stripes") for op in rings(made)} == {config(plan).cp}
    assert {op.results[0].type.layout.state("cp") for op in found(made, "aten.embedding")} >= {(1, 1)}


@pytest.mark.parametrize(
    "plan",
    [
        "cp=2",
        pytest.param("cp=4,recompute=full", marks=pytest.mark.exact),
        pytest.param("cp=2,tp=3", marks=pytest.mark.exact),
        pytest.param("dp=2,cp=2,micro_batches=2,distribute_param=use", marks=pytest.mark.exact),
        pytest.param("pp=2,cp=2,micro_batches=2,schedule=zero-bubble", marks=pytest.mark.exact),
    ],
)
def test_a_step_in_rings_is_exact(plan: str) -> None:
    made = three_heads().prove(config(f"{plan},gather_keys=false")).module
    assert {op.name for op in rings(made)} == {"moai.ring_sdpa", "moai.ring_sdpa_backward"}
    assert not found(made, "moai.sdpa")
    assert not found(made, "moai.sdpa_backward")


def test_a_ring_is_selected_where_memory_is_short() -> None:
    gathered, ring = (three_heads().builder.build(config(f"cp=4,gather_keys={word}")) for word in ("true", "false"))
    most, least = (memory_of(plan, fused_functions()).peak for plan in (gathered, ring))
    assert least < 0.9 * most
    assert selected(most).search_result.selected == gathered.config
    short = selected(most - 1)
    assert short.search_result.selected == ring.config
    assert rings(short.plan.module)


def selected(memory: int) -> Selection:
    request = Request(dp=1, tp=1, pp=1, cp=4, micro_batches=1, recompute="saved")
    return search(three_heads().step.module, machine(4, memory), request, pool=InProcessPool())
