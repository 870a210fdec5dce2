"""Machines whose workers are not equally fast: stages get what their workers can do, and slow ones may be left out."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from moaic.capture.trace_only import ModelSource, Sample
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.passes.config import Config, Request, simplicity
from moaic.passes.perf import machine_text
from moaic.passes.perf.machine import Machine, WorkerKind
from moaic.passes.perf.numbers import Number
from moaic.passes.stage_shares import EQUAL, parse_shares
from moaic.planner.candidates import candidate_space, candidates
from moaic.planner.outcome import TIE
from moaic.planner.pricer import Pricer
from moaic.planner.request import parse_request
from moaic.planner.search import search
from moaic.planner.stage_speeds import speeds_of
from moaic.planner.worker import InProcessPool
from moaic.predict.captured_step import captured_step
from moaic.predict.cluster_file import read_cluster
from moaic.predict.named_clusters import named_cluster

STEPS = 1 << 40
"""So many that the time to compile does not count."""

WIDE = {
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "vocab_size": 256,
    "num_hidden_layers": 4,
}


@cache
def wide_step() -> Module:
    return captured_step(ModelSource("llama", WIDE), Sample(8, 512, padding=False))


def mixed(fast: int, slow: int, factor: float = 3.0, memory: int = 1 << 60) -> Machine:
    """H100s, and then GPUs that are so many times slower."""
    base = replace(named_cluster("h100").machine(fast + slow), memory=memory)

    def kind(workers: int, by: float) -> WorkerKind:
        rates = {name: Number(rate.value / by, rate.source) for name, rate in base.flops.items()}
        traffic = Number(base.bandwidth.value / by, base.bandwidth.source)
        alike = (base.call_overhead, base.launch, base.contention, base.overlaps, base.adds_traffic)
        return WorkerKind(f"{by} times slower", workers, memory, traffic, rates, *alike)

    slowest = kind(slow, factor)
    kinds = (kind(fast, 1.0), slowest)
    return replace(base, bandwidth=slowest.bandwidth, flops=slowest.flops, kinds=kinds)


def best(machine: Machine, request: Request | None = None) -> tuple[Config, float]:
    found = search(wide_step(), machine, request or Request(), pool=InProcessPool(), steps=STEPS, runs=False)
    chosen = found.search_result.selected
    return chosen, found.search_result.of(chosen).price(STEPS)


def test_workers_of_equal_kinds_are_priced_as_equal_workers() -> None:
    equal, config = replace(mixed(1, 1), kinds=()), Config(pp=2, micro_batches=4)
    twice = replace(mixed(1, 1), kinds=(mixed(1, 1).kinds[1],) * 2)
    assert Pricer(wide_step(), twice).price(config) == Pricer(wide_step(), equal).price(config)


def test_each_stage_is_as_fast_as_its_slowest_worker() -> None:
    config = Config(pp=2, dp=2, micro_batches=4)

    def seconds(machine: Machine, of: Config = config) -> float:
        return Pricer(wide_step(), machine).price(of)[1].seconds.value

    all_fast, all_slow = (seconds(replace(each, kinds=())) for each in (named_cluster("h100").machine(4), mixed(2, 2)))
    even, apart = seconds(mixed(2, 2)), seconds(mixed(2, 2), replace(config, stage_shares="3+1"))
    assert all_fast < apart < even < all_slow
    assert seconds(mixed(1, 3)) == pytest.approx(all_slow), "a slow worker beside a fast one in the first stage"


def test_the_best_plan_gives_fast_workers_more_layers() -> None:
    config, seconds = best(mixed(1, 1), Request(dp=1, tp=1))
    fast, slow = parse_shares(config.stage_shares)
    assert 2.7 < fast / slow < 3.3
    assert seconds < 0.9 * best(mixed(1, 1).by_kind[0], Request(pp=1, dp=1, tp=1))[1]


@pytest.mark.parametrize(("fast", "slow", "factor"), [(1, 1, 2.0), (1, 3, 20.0), (3, 1, 20.0)])
def test_more_workers_never_make_a_step_slower(fast: int, slow: int, factor: float) -> None:
    _, alone = best(replace(mixed(fast, 0, factor=1.0), kinds=()))
    config, seconds = best(mixed(fast, slow, factor))
    assert seconds <= alone * (1 + TIE), config
    if factor == 20.0:
        assert config.ranks == fast, "the slow ones are left out"


def test_equal_shares_are_the_simplest() -> None:
    assert simplicity(Config(pp=2)) < simplicity(Config(pp=2, stage_shares="3+1"))


@pytest.mark.parametrize(
    ("fast", "slow"),
    [(1, 1), pytest.param(2, 2, marks=pytest.mark.exact), pytest.param(1, 3, marks=pytest.mark.exact)],
)
def test_no_plan_that_is_left_out_is_better(fast: int, slow: int) -> None:
    machine, request = mixed(fast, slow, 2.5), Request(recompute="saved", cp=1, loss_chunks=1)
    space = candidate_space(wide_step(), machine.workers, request, speeds_of(wide_step(), machine))
    pricer, prices = Pricer(wide_step(), machine), dict[Config, float]()
    for config in (each for mesh in space.meshes for each in space.on(mesh)):
        try:
            prices[config] = pricer.price(config)[1].seconds.value
        except Diagnostic:
            continue
    found, seconds = best(machine, request)
    assert seconds == pytest.approx(prices[found])
    assert seconds <= min(prices.values()) * (1 + TIE)


def test_every_worker_must_have_the_memory_for_its_stage() -> None:
    machine = mixed(1, 1)
    config = Config(pp=2, micro_batches=4, stage_shares="3+1")
    peak = Pricer(wide_step(), machine).price(config)[0].peak
    fast, slow = machine.kinds

    def found(of_fast: int, of_slow: int) -> int:
        kinds = (replace(fast, memory=of_fast), replace(slow, memory=of_slow))
        memory, _ = Pricer(wide_step(), replace(machine, memory=min(of_fast, of_slow), kinds=kinds)).price(config)
        return memory.limit - memory.peak

    assert found(peak, peak) == 0, "the stage with more layers needs most"
    assert found(peak, peak // 2) >= 0, "the other one needs less, and may have less"
    assert found(peak // 2, peak) < 0
    assert found(peak, peak // 8) < 0
    assert found(2 * peak, peak * 9 // 10) == peak, "the other one has less left, but more of what it has"


def test_shares_are_those_of_the_slowest_ranks_and_equal_where_little_differs() -> None:
    speeds = speeds_of(wide_step(), mixed(4, 4, 2.0))
    assert speeds is not None
    assert speeds.shares(Config(pp=2, dp=4)) == ["2+1", EQUAL], "by speed, and by memory"
    assert speeds.shares(Config(pp=4, dp=2)) == ["2+2+1+1", EQUAL]
    assert speeds.shares(Config(pp=2, dp=2)) == [EQUAL], "it has no slow worker"
    assert speeds.shares(Config(pp=2, dp=1, tp=4)) == ["2+1", EQUAL]
    assert speeds.fastest(Config(pp=2, dp=4)) == pytest.approx(6, rel=0.05)
    assert speeds.fastest(Config(dp=8)) == pytest.approx(4, rel=0.05)
    close = speeds_of(wide_step(), mixed(1, 1, 1.05))
    assert close is not None
    assert close.shares(Config(pp=2)) == [EQUAL]
    extreme = speeds_of(wide_step(), mixed(1, 1, 4000.0))
    assert extreme is not None
    assert extreme.shares(Config(pp=2)) == ["3333+1", EQUAL]
    assert speeds_of(wide_step(), named_cluster("h100").machine(8)) is None


def test_the_fastest_are_those_that_run_the_step_fastest() -> None:
    machine = mixed(1, 1)
    narrow = Number(machine.bandwidth.value / 20)
    # It multiplies fastest of all, and waits for its memory.
    waiting = replace(machine.kinds[0], bandwidth=narrow, launch=Number(1e-3))
    speeds = speeds_of(wide_step(), replace(machine, kinds=(waiting, machine.kinds[1])))
    assert speeds is not None
    assert speeds.machine.kinds == (machine.kinds[1], waiting)
    assert speeds.of_kind[0] > speeds.of_kind[1]


def test_a_fast_worker_with_little_memory_gets_little() -> None:
    machine = mixed(1, 1, 1.3)
    fast, slow = machine.kinds
    request = parse_request("pp=2,dp=1,tp=1,micro_batches=4,recompute=saved,schedule=1f1b,loss_chunks=1")
    whole, _ = Pricer(wide_step(), machine).price(Config())
    little = replace(fast, memory=whole.peak // 4)
    limited = replace(machine, memory=little.memory, kinds=(little, replace(slow, memory=whole.peak)))
    config, _ = best(limited, request)
    assert config.stage_shares == "1+4"


def test_asked_shares_are_those_of_all_candidates() -> None:
    found = candidates(wide_step(), 4, parse_request("stage_shares=3+1"))
    assert {(each.pp, each.stage_shares) for each in found} == {(2, "3+1")}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("stage_shares=3", "has the shares of 1 worker along pp, the plan has pp=1"),
        ("pp=4,stage_shares=3+1", "has the shares of 2 workers along pp, the plan has pp=4"),
        ("stage_shares=3+0", "stage_shares=3+0 is not of the form 5+2"),
        ("stage_shares=3:1", "stage_shares=3:1 is not of the form 5+2"),
        ("stage_shares=1+1+1+1+1", "needs 5 workers, there are 4"),
    ],
)
def test_shares_that_are_none_are_refused(asked: str, said: str) -> None:
    with pytest.raises(Diagnostic, match=re.escape(said)):
        candidates(wide_step(), 4, parse_request(asked))


def test_the_kinds_are_written_with_the_machine() -> None:
    machine = mixed(2, 6)
    assert machine_text.from_text(machine_text.to_text(machine)) == machine


def test_devices_that_a_plan_does_not_use_change_nothing(tmp_path: Path) -> None:
    gpus = '[[device]]\nname = "h100"\ntarget = "sm_90"\ncontention = 0.25\n'
    others = '[[device]]\nname = "old"\nmatmul = {f32 = 5e12}\nvector = 5e12\nbandwidth = 300e9\nmemory = "16GB"\n'
    links = '[[link]]\nlevel = "host"\njoins = 2\nrate = 5e9\n[[link]]\nlevel = "between"\nrate = 5e9\n'
    hosts = ['[[host]]\nname = "a"\nworkers = 2\n', '[[host]]\nname = "b"\nworkers = 2\ndevice = "old"\n']
    alone, beside = tmp_path / "alone.toml", tmp_path / "beside.toml"
    alone.write_text(gpus + links + hosts[0])
    beside.write_text(gpus + others + links + "".join(hosts))
    machines = [read_cluster(path).machine(workers) for path, workers in ((alone, 2), (beside, 4))]
    prices = [Pricer(wide_step(), machine).price(Config(dp=2))[1] for machine in machines]
    assert prices[0].seconds == prices[1].seconds
