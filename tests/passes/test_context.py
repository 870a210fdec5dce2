"""The axis `cp`: the sequence split, attention by gathered keys and values or by an exchange of rows for heads."""

from __future__ import annotations

import re

import pytest

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module, Op
from moaic.ir.layout import WHOLE, State
from moaic.ir.verify import verify
from moaic.passes.annotate import Axis
from moaic.passes.candidates import candidates
from moaic.passes.config import Request
from moaic.passes.context import follow_context
from moaic.passes.solver_prices import Prices
from moaic.passes.tensor import follow_tensor
from tests.passes.models import LENGTH, config, proof
from tests.passes.steps import dense
from tests.passes.test_tensor import attention, prove

EAGER = Prices(latency=0.0, local=0.0)
SLOW = Prices(latency=0.0, local=0.0, flops=1e6)
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
    assert all(states(op)[0][1:] == (LENGTH // n,) for op in hidden), "every product of rows is split by tokens"


def test_keys_and_values_are_gathered_for_a_part_of_the_rows() -> None:
    made = proof("llama").builder.build(config("cp=2")).module
    (forward,) = found(made, "moai.sdpa")
    assert states(forward) == [(2, LENGTH // 2), WHOLE, WHOLE, (2, LENGTH // 2)]
    (backward,) = found(made, "moai.sdpa_backward")
    assert [value.type.layout.pending for value in backward.results] == [(), ("cp",), ("cp",)]
    assert len(found(made, "moai.reduce_scatter")) == 2, "the gradients of keys and of values"


@pytest.mark.parametrize(("heads", "groups", "n"), [(4, 2, 2), (4, 2, 4), (8, 8, 2)])
def test_rows_are_exchanged_for_heads_where_that_costs_less(heads: int, groups: int, n: int) -> None:
    whole = attention(heads, groups)
    split = follow_context(whole, Axis("cp", n), SLOW).module
    verify(split)
    (op,) = found(split, "moai.sdpa")
    assert states(op) == [(1, heads // n)] * 3, "a causal mask that is not spelled out is half of the work"
    assert len(found(split, "moai.all_to_all")) == 4
    prove(split, whole)


@pytest.mark.parametrize("prices", [EAGER, Prices(), Prices(link=1e6)])
def test_a_causal_flag_becomes_the_mask_of_the_rows(prices: Prices) -> None:
    """Three heads cannot be exchanged for rows."""
    whole = attention(3, 1)
    split = follow_context(whole, Axis("cp", 2), prices).module
    (op,) = found(split, "moai.sdpa")
    assert states(op) == [(2, 4), WHOLE, WHOLE]
    prove(split, whole)


def test_what_has_no_sequence() -> None:
    with pytest.raises(Diagnostic, match=re.escape("cp=2 splits the sequence, and @step has none")):
        follow_context(dense(), Axis("cp", 2))


def test_a_sequence_that_does_not_divide() -> None:
    with pytest.raises(Diagnostic, match=re.escape("cp=3 does not divide a sequence of 8; cp=2, cp=4 or cp=8 would")):
        follow_context(attention(4, 2), Axis("cp", 3))


def test_candidates_split_short_sequences_only_where_rows_are_few() -> None:
    step = proof("llama").step.module
    assert {config.cp for config in candidates(step, 4, Request())} == {1}
    assert {config.cp for config in candidates(step, 16, Request())} == {1, 2, 4, 8, 16}
    assert {config.cp for config in candidates(step, 4, Request(cp=2))} == {2}
    with pytest.raises(Diagnostic, match="cp=8 needs 8 workers, there are 4"):
        candidates(step, 4, Request(cp=8))


def test_heads_that_another_axis_has_split_are_named() -> None:
    split = follow_context(attention(8, 8), Axis("cp", 2), SLOW).module
    with pytest.raises(Diagnostic, match=r"tp=16 cannot split the 8 heads of layers.* once more: cp splits them"):
        follow_tensor(split, Axis("tp", 16))
