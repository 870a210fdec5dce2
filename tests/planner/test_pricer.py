"""A plan has the price of its written-out program, and nothing is lost where candidates are left out by bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any, Final, get_args

import pytest

from moaic.capture.trace_only import ModelSource, Sample
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Function, Module
from moaic.ir.overlap_schedule import overlap_schedule
from moaic.passes.build import Builder
from moaic.passes.config import Config, Distribute, Request
from moaic.passes.estimate.held import Held, Liveness
from moaic.passes.estimate.lower_bound import (
    Alone,
    Bounds,
    Work,
    is_coarser,
    least,
    sharded_otherwise,
    unstaged,
    work_of,
)
from moaic.passes.estimate.memory import Memory, fused_functions, memory_of
from moaic.passes.estimate.sequence import Instruction
from moaic.passes.estimate.step_time import EXPECTED_STEPS, Prediction, function_seconds, predict
from moaic.passes.estimate.structural import Sketch, sketch
from moaic.passes.perf.machine import Machine
from moaic.passes.pipeline.stage_actions import signature_on_workers
from moaic.passes.schedules import Schedule
from moaic.passes.sharding.solver.costs import coefficients_of
from moaic.passes.transforms.deepen import deepened
from moaic.planner.candidates import candidate_space, candidates
from moaic.planner.evaluation import LEAST_COMPILED, Evaluation
from moaic.planner.outcome import TIE
from moaic.planner.pricer import Pricer
from moaic.planner.worker import Compiled, InProcessPool
from moaic.predict.captured_step import captured_step
from moaic.predict.named_clusters import named_cluster

SMALL: Final = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "num_hidden_layers": 8,
}
GROUPED: Final = {**SMALL, "num_key_value_heads": 2}
MODELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": GROUPED,
    "gemma2": {**GROUPED, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16},
    "gpt2": {"n_embd": 64, "n_layer": 8, "n_head": 4, "vocab_size": 256},
    "qwen2_moe": {
        **GROUPED,
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "bart": {
        "d_model": 64,
        "encoder_layers": 6,
        "decoder_layers": 7,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "vocab_size": 256,
    },
}
"""Models with a stack of layers; with layers of two kinds, and of experts; with two stacks."""

OVERLAPS = pytest.mark.parametrize(
    "overlaps", [pytest.param(False, marks=pytest.mark.exact), True], ids=["in turn", "overlapping"]
)
"""Whether communication runs beside computation: in CI most is tried of what is harder to foresee."""

ERROR: Final = 0.01
"""Relative difference between the two prices."""

AMID: Final = 0.03
"""The same for a pipeline: a stage that begins amid a layer adds up its gradients in more than one way."""

Priced = tuple[Memory, Prediction]


@cache
def step_of(model: str) -> Module:
    return captured_step(ModelSource(model, MODELS[model]), Sample(32, 64))


@cache
def deep_step() -> Module:
    """A step whose candidates are priced from sketches without being asked to."""
    return made_deep(16)


@cache
def deeper_step() -> Module:
    """A step whose pipelines of four stages are priced from sketches, too."""
    return made_deep(20)


def made_deep(layers: int) -> Module:
    """The step of a llama of so many layers, as its capture would be: that of eight is made deep, too."""
    step = deepened(step_of("llama"), "model.layers", layers - SMALL["num_hidden_layers"])
    assert step is not None
    return step


def gpus(*, overlaps: bool, count: int = 8) -> Machine:
    return replace(named_cluster("h100").machine(count), overlaps=overlaps, memory=1 << 60)


@cache
def pricer_of(model: str, *, overlaps: bool) -> Pricer:
    """One for all tests, as for all plans of a search: what it knows of one plan serves the next."""
    return Pricer(step_of(model), gpus(overlaps=overlaps), worth=0)


@dataclass(frozen=True, slots=True)
class WrittenOut:
    """The prices of programs that are written out."""

    builder: Builder
    machine: Machine

    def price(self, config: Config) -> Priced:
        plan, fused = self.builder.build(config), fused_functions()
        if self.machine.overlaps:
            plan = replace(plan, programs=replace(plan.programs, joint=overlap_schedule(plan.programs.joint)))
        return memory_of(plan, fused), predict(plan, self.machine, function_seconds(self.machine, fused))


def drawn(model: str, count: int) -> Sequence[Config]:
    """Some candidates for eight ranks, and some that split the sequence; pipelines are one in three."""
    random = Random(f"{model} {count}")
    found = candidates(step_of(model), 8, Request())
    found += candidates(step_of(model), 8, Request(cp=2, pp=1))
    staged = [each for each in found if each.pp > 1]
    flat = [each for each in found if each.pp == 1]
    return [*random.sample(staged, count // 3), *random.sample(flat, count - count // 3)]


@OVERLAPS
@pytest.mark.parametrize(
    ("model", "count"),
    [
        ("llama", 6),
        *(pytest.param(model, 40, marks=pytest.mark.exact) for model in MODELS),
    ],
)
def test_a_plan_costs_what_its_written_out_program_costs(model: str, count: int, overlaps: bool) -> None:
    pricer, oracle = pricer_of(model, overlaps=overlaps), _oracle(model, gpus(overlaps=overlaps))
    compared = 0
    for config in drawn(model, count):
        written, found = _outcome(oracle, config), _outcome(pricer, config)
        if isinstance(written, str) or isinstance(found, str):
            assert found == written, config
            continue
        compared += 1
        (memory, prediction), (told_memory, told) = written, found
        error = ERROR if config.pp == 1 else AMID
        assert told.seconds.value == pytest.approx(prediction.seconds.value, rel=error), config
        assert told_memory.peak == pytest.approx(memory.peak, rel=error), config
        for kept in ("parameters", "gradients", "optimizer"):
            assert getattr(told_memory, kept) == getattr(memory, kept), config
    assert compared > count // 2


@pytest.mark.parametrize(
    "config",
    [
        Config(dp=2, pp=2, tp=2, micro_batches=4, schedule="interleaved"),
        *(
            pytest.param(each, marks=pytest.mark.exact)
            for each in (
                Config(dp=4, pp=2, micro_batches=8, distribute_param="optimizer"),
                Config(dp=4, pp=2, micro_batches=4, recompute="full", schedule="zero-bubble"),
                Config(dp=2, pp=4, micro_batches=8, distribute_param="step"),
                Config(dp=2, pp=2, tp=2, micro_batches=8, schedule="zero-bubble", distribute_param="use"),
                Config(pp=2, cp=2, dp=2, micro_batches=4, schedule="interleaved", distribute_param="step"),
                Config(pp=2, tp=4, micro_batches=8, schedule="interleaved", loss_chunks=2),
                Config(pp=2, tp=2, micro_batches=4, stage_shares="2+1"),
                Config(pp=2, dp=2, micro_batches=4, schedule="zero-bubble", stage_shares="1+3"),
            )
        ),
    ],
    ids=str,
)
@OVERLAPS
def test_a_pipeline_is_priced_from_few_layers_in_each_stage(
    config: Config, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, where, calls = deeper_step(), gpus(overlaps=overlaps), list[int]()

    def priced(module: Module, *others: Any) -> Sketch:
        calls.append(sum(op.name == "call" for op in module.main.ops))
        return sketch(module, *others)

    monkeypatch.setattr("moaic.planner.pricer.sketch", priced)
    builder = Builder(step, coefficients_of(where))
    memory, prediction = WrittenOut(builder, where).price(config)
    told_memory, told = Pricer(step, where, worth=0).price(config)
    assert len(calls) == 2
    assert max(calls) < sum(op.name == "call" for op in builder.partitioned(config).main.ops)
    assert told.seconds.value == pytest.approx(prediction.seconds.value, rel=AMID)
    assert told_memory.peak == pytest.approx(memory.peak, rel=AMID)
    for kept in ("parameters", "gradients", "optimizer"):
        assert getattr(told_memory, kept) == getattr(memory, kept)


def test_a_worker_of_a_pipeline_goes_through_its_own_instructions_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work of a price does not grow with the square of the stages."""
    foreign, signatures, held_by_worker = list[int](), list[Function](), Liveness.held

    def held(worker: Liveness, order: Sequence[Instruction]) -> Held:
        foreign.append(sum(index not in worker.own for index, _ in order))
        return held_by_worker(worker, order)

    def signature(main: Function, schedule: Schedule) -> Function:
        signatures.append(main)
        return signature_on_workers(main, schedule)

    monkeypatch.setattr(Liveness, "held", held)
    monkeypatch.setattr("moaic.passes.lowering.plan.signature_on_workers", signature)
    Pricer(deeper_step(), gpus(overlaps=True), worth=0).price(Config(pp=4, micro_batches=4))
    assert foreign == [0] * 8
    assert len(signatures) == 2


@pytest.mark.parametrize("config", [Config(dp=2, tp=2, micro_batches=2), Config(dp=4, recompute="full")], ids=str)
def test_the_passes_make_one_module_for_a_step_of_several_stacks(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sketches of a plan are that module with a unit less of some of its stacks."""
    pricer = Pricer(step_of("bart"), gpus(overlaps=True), worth=0)
    partitioned, made = Builder.partitioned, list[Builder]()

    def counted(builder: Builder, config: Config) -> Module:
        made.append(builder)
        return partitioned(builder, config)

    monkeypatch.setattr(Builder, "partitioned", counted)
    sketches = pricer.sketched(config)
    assert len(sketches) == 3
    assert len(made) == 1


def _outcome(prices: Pricer | WrittenOut, config: Config) -> Priced | str:
    """The price, or the reason why the plan is not possible."""
    try:
        return prices.price(config)
    except Diagnostic as reason:
        return reason.message


def _oracle(model: str, where: Machine) -> WrittenOut:
    return WrittenOut(Builder(step_of(model), coefficients_of(where)), where)


def test_plans_that_do_less_bound_others() -> None:
    where, pricer = gpus(overlaps=True), pricer_of("llama", overlaps=True)
    compared = 0
    for config in drawn("llama", 6):
        plan = _outcome(pricer, config)
        if isinstance(plan, str):
            continue
        for simpler in (least(config), unstaged(config)):
            bound = Bounds({}, where, {simpler: _work("llama", pricer, simpler)}).seconds(config)
            assert bound <= plan[1].seconds.value * 1.001, config
            compared += 1
    assert compared > 6


@pytest.mark.parametrize(
    ("model", "count"), [("llama", 8), *(pytest.param(model, 60, marks=pytest.mark.exact) for model in MODELS)]
)
def test_the_step_on_one_device_bounds_all_plans(model: str, count: int) -> None:
    """Their time, and what compiling them takes."""
    where, pricer = gpus(overlaps=True), pricer_of(model, overlaps=True)
    on_one: dict[Config, Alone] = {}
    for config in (Config(), Config(recompute="full")):
        memory, told = pricer.price(config)
        on_one[config] = Alone(told.seconds.value, memory, told.of("optimizer"), told.compiling, told.of("launch"))
    bounds, compiling = Bounds(on_one, where), min(each.compiling for each in on_one.values())
    compared = 0
    for config in drawn(model, count):
        plan = _outcome(pricer, config)
        if not isinstance(plan, str):
            compared += 1
            assert bounds.seconds(config) <= plan[1].seconds.value * 1.001, config
            assert LEAST_COMPILED * compiling <= plan[1].compiling, config
    assert compared > count // 2


@OVERLAPS
@pytest.mark.parametrize(
    ("model", "count"),
    [("llama", 6), *(pytest.param(model, 60, marks=pytest.mark.exact) for model in MODELS)],
)
def test_pipelines_take_no_less_than_their_stages(model: str, count: int, overlaps: bool) -> None:
    pricer = pricer_of(model, overlaps=overlaps)
    staged = [each for each in candidates(step_of(model), 8, Request()) if each.pp > 1]
    compared = 0
    for config in Random(model).sample(staged, count):
        plan, least = _outcome(pricer, config), pricer.stage_bound(config)
        if not isinstance(plan, str) and least.seconds > 0:
            compared += 1
            memory, prediction = plan
            assert least.seconds <= prediction.seconds.value * 1.001, config
            assert least.nbytes <= memory.peak, config
    assert compared > count // 2


@cache
def wide_pricer() -> Pricer:
    """Of a step whose weights are as large as its activations."""
    wide = {**MODELS["llama"], "hidden_size": 256, "intermediate_size": 512}
    return Pricer(captured_step(ModelSource("llama", wide), Sample(64, 8)), gpus(overlaps=False), worth=0)


@pytest.mark.parametrize(
    "config",
    [
        Config(micro_batches=2, pp=2),
        Config(micro_batches=4, pp=2, schedule="gpipe"),
        Config(micro_batches=4, pp=4, schedule="interleaved"),
        Config(micro_batches=2, pp=2, cp=2),
        Config(dp=2, micro_batches=2, distribute_param="step", pp=2),
        Config(dp=2, micro_batches=2, distribute_param="optimizer", pp=2, schedule="interleaved"),
    ],
    ids=str,
)
def test_gradients_as_large_as_activations_do_not_count_before_they_exist(config: Config) -> None:
    """A worker that runs all forwards first has no sums of gradients while it has all activations."""
    pricer = wide_pricer()
    (memory, prediction), least = pricer.price(config), pricer.stage_bound(config)
    assert 0 < least.nbytes <= memory.peak
    assert 0 < least.seconds <= prediction.seconds.value * 1.001


@pytest.mark.parametrize("overlaps", [False, True], ids=["in turn", "overlapping"])
@pytest.mark.parametrize("config", [Config(dp=4, tp=2, micro_batches=2), Config(dp=2, pp=4, micro_batches=8)], ids=str)
def test_the_price_of_one_sharding_bounds_the_others(config: Config, overlaps: bool) -> None:
    where, pricer = gpus(overlaps=overlaps), pricer_of("llama", overlaps=overlaps)
    prices = {level: pricer.price(replace(config, distribute_param=level))[1] for level in get_args(Distribute)}
    bounds = {level: sharded_otherwise(price, where) for level, price in prices.items() if level != "use"}
    for level, bound in bounds.items():
        for other, price in prices.items():
            assert bound <= price.seconds.value * 1.001, f"{level} bounds {other}"


def test_stages_share_out_the_layers_as_a_pipeline_does() -> None:
    builder = Builder(step_of("llama"))
    main = builder.partitioned(Config(pp=2, micro_batches=2)).main
    forward = [op for op in main.ops if op.name == "call" and op.loc.side == "forward"]
    owners = [op.results[0].type.layout.owner_on("pp") for op in forward]
    halves = builder.shares(builder.stacks, (1, 1))
    assert [share.units[0] for share in halves] == pytest.approx([owners.count(0), owners.count(1)])
    # A boundary may divide a layer: none of it is lost.
    thirds = builder.shares(builder.stacks, (1, 1, 1))
    assert sum(share.units[0] for share in thirds) == pytest.approx(8)
    assert sum(share.others for share in thirds) == pytest.approx(1)
    most, least = builder.shares(builder.stacks, (7, 1))
    assert most.units[0] > 2 * least.units[0]


def _work(model: str, pricer: Pricer, config: Config) -> Work:
    memory, prediction = pricer.price(config)
    return work_of(config, prediction, memory, len(step_of(model).main.gradients))


@OVERLAPS
@pytest.mark.parametrize("model", ["llama", *(pytest.param(each, marks=pytest.mark.exact) for each in MODELS)])
def test_plans_of_more_parts_take_no_less(model: str, overlaps: bool) -> None:
    """Every mesh is bounded by those that split the sequence and the weights less, and have no stages."""
    where, pricer = gpus(overlaps=overlaps), pricer_of(model, overlaps=overlaps)
    space = candidate_space(step_of(model), 8, Request(distribute_param="none", recompute="saved"))
    meshes = [space.simplest(mesh) for mesh in space.meshes if mesh.ranks == 8]
    flat = {each: outcome for each in meshes if not isinstance(outcome := _outcome(pricer, least(each)), str)}
    known = {each: _work(model, pricer, each) for each in flat if each == least(each)}
    bounds = {
        (coarser, each): Bounds({}, where, {coarser: work}).seconds(each)
        for coarser, work in known.items()
        for each in meshes
        if is_coarser(coarser, each.mesh)
    }
    compared = 0
    for (coarser, each), bound in bounds.items():
        plan = _outcome(pricer, each)
        if not isinstance(plan, str) and bound > 0:
            compared += 1
            assert bound <= plan[1].seconds.value * 1.001, f"{coarser} bounds {each}"
    assert compared > 4


class Counting(InProcessPool):
    """A pool that counts what it compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def compile(self, configs: Sequence[Config]) -> list[Compiled]:
        self.count += len(configs)
        return super().compile(configs)


@pytest.mark.parametrize(
    ("is_deep", "count", "mebibytes"),
    [
        (False, 2, 24),
        pytest.param(False, 4, 16, marks=pytest.mark.exact),
        pytest.param(False, 4, 1 << 20, marks=pytest.mark.exact),
        pytest.param(True, 4, 9, marks=pytest.mark.exact),
        pytest.param(True, 4, 6, marks=pytest.mark.exact),
    ],
)
def test_what_is_left_out_would_not_have_been_selected(is_deep: bool, count: int, mebibytes: int) -> None:
    """Beside every candidate compiled."""
    step = deep_step() if is_deep else step_of("llama")
    where = replace(gpus(overlaps=True, count=count), memory=mebibytes << 20)
    request = Request(distribute_param="optimizer")
    configs = candidates(step, count, request)
    pool = Counting()
    found = Evaluation(step, candidate_space(step, count, request), pool, where, EXPECTED_STEPS)
    found.run()
    assert pool.count < len(configs)
    prices = _all(step, configs, where)
    assert found.simplest is not None
    assert prices[found.simplest] <= min(prices.values()) * (1 + TIE)


def _all(step: Module, configs: Sequence[Config], where: Machine) -> dict[Config, float]:
    """The price of every candidate that fits."""
    pricer = Pricer(step, where)
    priced = ((config, _outcome(pricer, config)) for config in configs)
    possible = ((config, plan) for config, plan in priced if not isinstance(plan, str))
    return {config: told.price(EXPECTED_STEPS) for config, (memory, told) in possible if memory.peak <= where.memory}
