"""What 1F1B is for: a worker keeps as many micro-batches as are under way, not all of them; predicted and measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

HERE = Path(__file__).parent

Rows = list[dict[str, int]]


def measure(schedule: str) -> Rows:
    # What is freed goes back to the system at once, so that what is resident is what is in use.
    allocator = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    variables = {**os.environ, **allocator, "PYTHONPATH": str(HERE.parent / "examples")}
    command = [sys.executable, str(HERE / "memory_once.py"), schedule]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    return [cast("dict[str, int]", json.loads(line)) for line in done.stdout.splitlines()]


@pytest.mark.timeout(1200)
def test_memory_follows_the_schedule(benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("gpipe", "1f1b", "zero-bubble")
    found = cast(
        "dict[str, Rows]", benchmark.pedantic(lambda: {name: measure(name) for name in names}, rounds=1, iterations=1)
    )
    benchmark.extra_info["workers"] = found
    with capsys.disabled():
        for name, rows in found.items():
            for row in rows:
                print(
                    f"\n{name:12} worker {row['worker']}: {row['live']} micro-batches live, "
                    f"{row['predicted'] / 1e6:.0f} MB predicted, {row['measured'] / 1e6:.0f} MB measured",
                    end="",
                )
        print()
