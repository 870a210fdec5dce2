"""The cost of an installed moaic for a program that does not use it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from statistics import median
from typing import cast

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

ROUNDS = 10


def seconds_to_import_torch(autoload: str) -> float:
    start = time.perf_counter()
    variables = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
    subprocess.run([sys.executable, "-c", "import torch"], env=variables, check=True)
    return time.perf_counter() - start


def both() -> tuple[list[float], list[float]]:
    """Interleaved: with the entry point that torch loads at import, and without."""
    pairs = [(seconds_to_import_torch("1"), seconds_to_import_torch("0")) for _ in range(ROUNDS)]
    return [loaded for loaded, _ in pairs], [bare for _, bare in pairs]


def test_import_torch(benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str]) -> None:
    both()
    measured = cast("tuple[list[float], list[float]]", benchmark.pedantic(both, rounds=1, iterations=1))
    loaded, bare = (1000 * median(seconds) for seconds in measured)
    slower = loaded - bare
    benchmark.extra_info["slower_ms"] = slower
    with capsys.disabled():
        print(f"\nimport torch: {bare:.0f} ms, {slower:.0f} ms slower with moaic installed (limit 50)")
