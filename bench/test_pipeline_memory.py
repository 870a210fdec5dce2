"""The memory of 1F1B, predicted and measured: a worker holds the activations of the micro-batches in flight only."""

from __future__ import annotations

from typing import cast

import pytest
from memory import Rows, memory_of
from pytest_benchmark.fixture import BenchmarkFixture

from moaic.passes.schedules import schedule_of

PARTS = 8
SIZE = ("--workers", "2", "--rows", "32", "--layers", "6")


@pytest.mark.timeout(1200)
def test_memory_follows_the_schedule(benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("gpipe", "1f1b", "zero-bubble")

    def measured() -> dict[str, Rows]:
        return {name: memory_of(f"pp=2,micro_batches={PARTS},schedule={name}", *SIZE) for name in names}

    found = cast("dict[str, Rows]", benchmark.pedantic(measured, rounds=1, iterations=1))
    benchmark.extra_info["workers"] = found
    with capsys.disabled():
        for name, rows in found.items():
            live = schedule_of(name, 2, PARTS).live
            for worker, row in enumerate(rows):
                print(
                    f"\n{name:12} worker {worker}: {live(worker)} micro-batches live, "
                    f"{row['predicted'] / 1e6:.0f} MB predicted, {row['measured'] / 1e6:.0f} MB measured",
                    end="",
                )
        print()
