"""Steps of the 20 M Llama on two cores, beside other systems."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from peers import PEERS, Figures, Setting, compare, launch, table, write_data
from pytest_benchmark.fixture import BenchmarkFixture


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peers(benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path, dtype: str) -> None:
    """Ratios are moai's over the best peer's, and its cold start and memory over those of DDP with Inductor."""
    setting = Setting(dtype, layers=6, steps=8, folder=tmp_path)
    found = cast("Figures", benchmark.pedantic(compare, args=(list(PEERS), setting, 3), rounds=1, iterations=1))
    ours, ddp = found["moai"], found["ddp + inductor"]
    best = max(row["tokens_per_second"] for name, row in found.items() if not name.startswith("moai"))
    ratios = {
        "tokens/s over best peer": ours["tokens_per_second"] / best,
        "cold first step over DDP": ours["cold_first_step_s"] / ddp["cold_first_step_s"],
        "memory over DDP": ours["peak_memory_gb"] / ddp["peak_memory_gb"],
        "memory over DDP, distributed": found["moai distributed"]["peak_memory_gb"] / ddp["peak_memory_gb"],
    }
    benchmark.extra_info.update({"peers": found, "ratios": ratios})
    with capsys.disabled():
        print(f"\n{dtype}\n{table(found)}\n" + ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()))


@pytest.mark.timeout(1200)
def test_depth(benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Cold start of 6 and of 24 layers of equal width: repeated layers are planned and compiled once."""

    def starts() -> dict[int, float]:
        found: dict[int, float] = {}
        for layers in (6, 24):
            setting = Setting("float32", layers, steps=3, folder=tmp_path / str(layers))
            setting.folder.mkdir()
            write_data(setting.folder)
            found[layers] = launch(PEERS["moai"], setting).first_step
        return found

    found = cast("dict[int, float]", benchmark.pedantic(starts, rounds=1, iterations=1))
    benchmark.extra_info["cold_first_step_s"] = found
    with capsys.disabled():
        print(
            "\ncold first step: " + ", ".join(f"{layers} layers {seconds:.1f} s" for layers, seconds in found.items())
        )
