"""The time of planning a model of full size: an 8B-shaped Llama on GPUs that are not here."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest

from moaic.capture.trace_only import ModelSource, Sample
from moaic.ir.graph import Module
from moaic.passes.config import Request
from moaic.planner.processes import ProcessPool
from moaic.planner.search import SearchResult, search
from moaic.predict.captured_step import captured_step
from moaic.predict.named_clusters import named_cluster

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
WORKERS, BATCH, SEQUENCE = 8, 16, 2048


@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_planning_an_8b_model(benchmark: Any, target: str) -> None:
    """Every kind of parallelism at once, over all meshes; where 80 GB are short, and where there is room."""
    times: dict[str, float] = {}

    def planned() -> SearchResult:
        start = time.perf_counter()
        step = captured_step(ModelSource("llama", LLAMA_8B), Sample(BATCH, SEQUENCE))
        times["capture_s"] = time.perf_counter() - start
        return _searched(step, target, times)

    search_result = benchmark.pedantic(planned, rounds=1)
    told = Counter("made" if each.memory is not None else "left out" for each in search_result.candidates)
    benchmark.extra_info.update({**times, **told, "plan": str(search_result.selected)})
    print(f"\n{target}: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in times.items()))
    print(f"{dict(told)} candidates; {search_result.selected}")


def _searched(step: Module, target: str, times: dict[str, float]) -> SearchResult:
    pool = ProcessPool(2)
    try:
        start = time.perf_counter()
        search_result = search(step, named_cluster(target).machine(WORKERS), Request(), pool=pool).search_result
        times["search_s"] = time.perf_counter() - start
    finally:
        pool.close()
    return search_result
