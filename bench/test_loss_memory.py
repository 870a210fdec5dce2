"""Memory and time of a step of a small Llama with 32,000 words, whole or in chunks, and in PyTorch."""

from __future__ import annotations

from statistics import median
from typing import cast

import pytest
from memory import Rows, memory_of
from pytest_benchmark.fixture import BenchmarkFixture

WAYS = ("inductor", "loss_chunks=1", "loss_chunks=8")
SIZE = ("--vocabulary", "32000")
ROUNDS = 3


@pytest.mark.timeout(1800)
def test_a_large_vocabulary(benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str]) -> None:
    """One process with all cores, 2,048 tokens; ways take turns, time is measured with memory left to the allocator."""

    def measured() -> tuple[dict[str, Rows], dict[str, list[float]]]:
        memory = {way: memory_of(way, *SIZE) for way in WAYS}
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(ROUNDS):
            for way in WAYS:
                seconds[way].append(memory_of(way, *SIZE, returned=False)[0]["seconds"])
        return memory, seconds

    memory, seconds = cast(
        "tuple[dict[str, Rows], dict[str, list[float]]]", benchmark.pedantic(measured, rounds=1, iterations=1)
    )
    benchmark.extra_info.update({"memory": memory, "seconds": seconds})
    with capsys.disabled():
        for way in WAYS:
            (row,) = memory[way]
            expected = f"{row['predicted'] / 1e6:.0f} MB predicted, " if row["predicted"] else ""
            print(f"\n{way:14} {expected}{row['measured'] / 1e6:.0f} MB, {median(seconds[way]):.2f} s a step", end="")
        print()
