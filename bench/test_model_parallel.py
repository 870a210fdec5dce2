"""Pipelines and tensor parallelism beside PyTorch's own with the same cuts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
from peers import MODEL_PARALLEL, Figures, Setting, compare, table
from pytest_benchmark.fixture import BenchmarkFixture
from schedules import beside

from moaic.ir.parser import parse
from moaic.passes.perf.machine import Machine
from moaic.passes.perf.machine_text import from_text
from moaic.planner.request import parse_request
from moaic.planner.search import search
from moaic.planner.worker import InProcessPool

WIDTHS = {
    "20 M Llama": (6, ()),
    "deeper, narrower": (12, ("--hidden", "256", "--intermediate", "1024", "--heads", "4")),
}


def predicted(folder: Path, names: Sequence[str]) -> dict[str, float]:
    """Seconds that the planner gives a step of each peer, all by one of the machines that they measured.

    Each starts with empty caches and so measures the machine for itself: the one with the median rate speaks for all.
    """
    dumps = {name: _dump(folder, MODEL_PARALLEL[name].plan) for name in names}
    measured = [from_text((dump / "machine.json").read_text(encoding="utf-8")) for dump in dumps.values()]
    machine = sorted(measured, key=lambda each: each.rate("mm", "f32").value)[len(measured) // 2]
    return {name: _seconds(dump, machine, MODEL_PARALLEL[name].plan) for name, dump in dumps.items()}


def simulated(folder: Path, plan: str) -> float:
    """The program's time as its schedule is simulated, with what its functions took, over its time on the workers."""
    dump = _dump(folder, plan)
    expected, measured = beside(dump / "joint.moai", dump.parent.parent / "trace.json")
    return expected / measured


def _dump(folder: Path, plan: str) -> Path:
    (found,) = folder.glob(f"moai-{plan}-float32/dump/*")
    return found


def _seconds(dump: Path, machine: Machine, plan: str) -> float:
    step = parse((dump / "graph.moai").read_text(encoding="utf-8"))
    search_result = search(step, machine, parse_request(plan), pool=InProcessPool()).search_result
    prediction = search_result.of(search_result.selected).prediction
    assert prediction is not None
    return prediction.seconds.value


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("size", WIDTHS)
def test_model_parallel(
    benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path, size: str
) -> None:
    """Ratios are moai's 1F1B over PyTorch's and moai's tp over DTensor's; predictions are held against schedules."""
    layers, options = WIDTHS[size]
    setting = Setting("float32", layers, 8, tmp_path, options)
    peers = list(MODEL_PARALLEL)
    arguments = (peers, setting, 2, MODEL_PARALLEL)
    found = cast("Figures", benchmark.pedantic(compare, args=arguments, rounds=1, iterations=1))
    speed = {name: row["tokens_per_second"] for name, row in found.items()}
    expected = predicted(tmp_path, [name for name in peers if name.startswith("moai")])
    guesses = {name: seconds / found[name]["step_s"] for name, seconds in expected.items()}
    clocks = {name: simulated(tmp_path, MODEL_PARALLEL[name].plan) for name in expected}
    ratios = {
        "1f1b over PyTorch's": speed["moai pp 1f1b"] / max(speed["torch 1f1b"], speed["torch 1f1b compiled"]),
        "tp over DTensor's": speed["moai tp"] / max(speed["dtensor tp"], speed["dtensor tp compiled"]),
    }
    shown = {"ratios": ratios, "predicted over measured": guesses, "simulated over measured": clocks}
    benchmark.extra_info.update({"peers": found, **shown})
    with capsys.disabled():
        print(f"\n{size}\n{table(found)}")
        for title, numbers in shown.items():
            print(f"{title}: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in numbers.items()))
