"""A shallow copy of a step is the step of a model with fewer layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from moaic.capture.trace_only import ModelSource, Sample
from moaic.ir.graph import Module, Op
from moaic.ir.verify import check_made, load
from moaic.passes.build import Builder
from moaic.passes.config import Config
from moaic.passes.perf.flops import function_flops
from moaic.passes.perf.structural_hash import key_of
from moaic.passes.transforms.outline import outline
from moaic.passes.transforms.shallow import Stack, shallow, stacks_of
from moaic.predict.captured_step import captured_step

LLAMA: Mapping[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


@cache
def captured(layers: int) -> Module:
    settings = {**LLAMA, "num_hidden_layers": layers}
    return captured_step(ModelSource("llama", settings), Sample(4, 8))


def llama(layers: int) -> Module:
    return outline(captured(layers))


def keys(module: Module) -> list[str]:
    """The structure of every function, calls standing for themselves alone."""
    return [key_of(replace(each, ops=tuple(map(_once, each.ops)))) for each in module.functions]


def _once(op: Op) -> Op:
    return replace(op, attrs={"callee": op.callee}) if op.name == "call" else op


def test_a_shallow_step_is_that_of_a_shallow_model() -> None:
    deep = llama(7)
    (stack,) = stacks_of(deep.main)
    assert stack == Stack("model.layers", 0, 1, 7)
    found = shallow(deep, stack, 4)
    assert found is not None
    assert keys(check_made(found, "shallow")) == keys(llama(4))
    assert found.runs() == deep.runs()
    assert function_flops(found, found.main) == function_flops(deep, deep.main)


def test_what_is_made_of_equal_layers_has_a_shallow_form() -> None:
    """A plan of four layers without one is that of three, but for how many layers a call stands for."""
    for config in (Config(dp=2, tp=2, micro_batches=2), Config(dp=4, distribute_param="use", recompute="full")):
        plans = [Builder(captured(layers)).partitioned(config) for layers in (3, 4)]
        found = shallow(plans[1], Stack("model.layers", 0, 1, 4), 3)
        assert found is not None
        assert keys(check_made(found, "shallow")) == keys(plans[0])


def test_layers_of_another_layout_stand_for_no_others() -> None:
    text = """// moai 1
mesh [dp=2]
func @a.fwd(%x: f32[4], %w: f32[4]) -> (f32[4]) {
  %y = aten.mul.Tensor %x, %w : f32[4]
  return %y
}
func @step(%h0: f32[4], %w: f32[4]) -> (f32[4]) {
  %h1 = call @a.fwd %h0, %w : f32[4] in "m.0" forward
  %h2 = call @a.fwd %h1, %w : f32[4] in "m.1" forward
  %h3 = call @a.fwd %h2, %w : f32[4] in "m.2" forward
  %s = moai.shard %h3 {axis = "dp"} : f32[4{dp}] in "m.2" forward
  %g = moai.all_gather %s {axis = "dp"} : f32[4] in "m.2" forward
  %h4 = call @a.fwd %g, %w : f32[4] in "m.3" forward
  return %h4
}
"""
    assert shallow(load(text), Stack("m", 0, 1, 4), 3) is None


def test_a_layer_that_reshards_what_it_reads_is_as_the_others_for_those_that_read_it() -> None:
    """The lowest layer in the forward and the highest in the backward read what is outside of the stack."""
    module = load("""// moai 1
mesh [dp=2]
func @a(%x: f32[4], %w: f32[4]) -> (f32[4]) {
  %y = aten.mul.Tensor %x, %w : f32[4]
  return %y
}
func @step(%x: f32[4{dp}], %g: f32[4{dp}], %w: f32[4]) -> (f32[4], f32[4]) {
  %h0 = moai.all_gather %x {axis = "dp"} : f32[4] in "m.0" forward
  %h1 = call @a %h0, %w : f32[4] in "m.0" forward
  %h2 = call @a %h1, %w : f32[4] in "m.1" forward
  %h3 = call @a %h2, %w : f32[4] in "m.2" forward
  %h4 = call @a %h3, %w : f32[4] in "m.3" forward
  %d4 = moai.all_gather %g {axis = "dp"} : f32[4] in "m.3" backward
  %d3 = call @a %d4, %w : f32[4] in "m.3" backward
  %d2 = call @a %d3, %w : f32[4] in "m.2" backward
  %d1 = call @a %d2, %w : f32[4] in "m.1" backward
  %d0 = call @a %d1, %w : f32[4] in "m.0" backward
  return %h4, %d0
}
""")
    found = shallow(module, Stack("m", 0, 1, 4), 3)
    assert found is not None
    main = check_made(found, "shallow").main
    assert [op.loc.module for op in main.ops if op.name == "call"] == ["m.0", "m.1", "m.3", "m.3", "m.1", "m.0"]
    assert sum(op.name == "moai.all_gather" for op in main.ops) == 2


PAIR = """func @a.fwd(%x: f32[4], %w: f32[4]) -> (f32[4]) {
  %y = aten.mul.Tensor %x, %w : f32[4]
  return %y
}
func @b.fwd(%x: f32[4], %w: f32[4]) -> (f32[4]) {
  %y = aten.add.Tensor %x, %w : f32[4]
  return %y
}
"""


def chain(kinds: str, after: str, size: int = 4) -> Module:
    """A chain of calls of these kinds, one for each layer; `after` returns f32[size]."""
    weights = ", ".join(f"%w{number}: f32[4]" for number in range(len(kinds)))
    calls = [
        f'  %h{number + 1} = call @{kind}.fwd %h{number}, %w{number} : f32[4] in "m.{number}" forward'
        for number, kind in enumerate(kinds)
    ]
    text = "\n".join([f"func @step(%h0: f32[4], {weights}) -> (f32[{size}]) {{", *calls, after, "}"])
    return load("// moai 1\n" + PAIR + text)


def test_layers_of_two_kinds_are_taken_out_in_pairs() -> None:
    module = chain("ababababab", "  return %h10")
    (stack,) = stacks_of(module.main)
    assert stack == Stack("m", 0, 2, 5)
    found = shallow(module, stack, 3)
    assert found is not None
    calls = [op for op in check_made(found, "shallow").main.ops if op.name == "call"]
    assert [(op.callee, op.loc.module, op.times) for op in calls] == [
        *(("a.fwd", "m.0", 1), ("b.fwd", "m.1", 1), ("a.fwd", "m.2", 3), ("b.fwd", "m.3", 3)),
        *(("a.fwd", "m.8", 1), ("b.fwd", "m.9", 1)),
    ]
    assert [param.name for param in found.main.params] == ["h0", "w0", "w1", "w2", "w3", "w8", "w9"]


def test_the_longest_stack_is_found_between_other_layers() -> None:
    module = chain("bbaaaaab", "  return %h8")
    assert stacks_of(module.main) == [Stack("m", 2, 1, 5)]


def test_what_reads_all_layers_keeps_them() -> None:
    text = ", ".join(f"%h{number}" for number in range(1, 6))
    module = chain("aaaaa", f"  %all = aten.cat [{text}] {{dim = 0}} : f32[20]\n  return %all", 20)
    assert shallow(module, stacks_of(module.main)[0], 3) is None


def test_a_sum_over_all_layers_loses_the_terms_of_those_that_are_taken_out() -> None:
    adds = ["  %s1 = aten.add.Tensor %h5, %h4 : f32[4]"]
    adds += [f"  %s{5 - n} = aten.add.Tensor %s{4 - n}, %h{n} : f32[4]" for n in (3, 2, 1)]
    module = chain("aaaaa", "\n".join([*adds, "  return %s4"]))
    found = shallow(module, stacks_of(module.main)[0], 3)
    assert found is not None
    assert sum(op.name == "aten.add.Tensor" for op in check_made(found, "shallow").main.ops) == 2
