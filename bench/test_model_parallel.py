"""Plans that cut the model, beside PyTorch's own pipelines and tensor parallelism with the same cuts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

import pytest
from peers import MODEL_PARALLEL, Figures, Setting, compare, table
from pytest_benchmark.fixture import BenchmarkFixture

WIDTHS = {
    "20 M Llama": (6, ()),
    "deeper, narrower": (12, ("--hidden", "256", "--intermediate", "1024", "--heads", "4")),
}


def predicted(folder: Path, name: str) -> float:
    """Seconds that the planner gave a step of the peer `name`."""
    peer = MODEL_PARALLEL[name]
    (path,) = folder.glob(f"{peer.way}-{peer.plan}-float32/dump/*/candidates.txt")
    found = re.search(r"  possible +([0-9.]+) ", path.read_text(encoding="utf-8"))
    assert found is not None
    return float(found[1]) / 1000


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
    guesses = {name: predicted(tmp_path, name) / found[name]["step_s"] for name in peers if name.startswith("moai")}
    ratios = {
        "1f1b over PyTorch's": speed["moai pp 1f1b"] / max(speed["torch 1f1b"], speed["torch 1f1b compiled"]),
        "tp over DTensor's": speed["moai tp"] / max(speed["dtensor tp"], speed["dtensor tp compiled"]),
    }
    benchmark.extra_info.update({"peers": found, "ratios": ratios, "predicted over measured": guesses})
    with capsys.disabled():
        print(f"\n{size}\n{table(found)}\n" + ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()))
        print("predicted over measured: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in guesses.items()))
