"""How long planning takes for a model on many devices: one case, none of its devices needed.

`python bench/plan_scale.py --model llama3-8b --cluster h100:256 --batch 512 --sequence 4096` prints seconds of capture
and of search (cold, and with the plan in the cache), how many candidates there are, how many were priced and how many
are possible, the selected plan, its predicted time and memory, and the sources of the time. `--json FILE` writes these.
Clusters are those of `moaic/predict/clusters`, or a file such as `cluster.toml`.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeVar

from moaic.capture.trace_only import ModelSource, Sample
from moaic.ir.graph import Module
from moaic.passes.config import Request
from moaic.passes.estimate.step_time import Prediction
from moaic.passes.perf.machine import Machine
from moaic.planner.plan_cache import search_cached
from moaic.planner.processes import ProcessPool
from moaic.planner.search import Selection
from moaic.predict.captured_step import captured_step
from moaic.predict.named_clusters import cluster_and_workers
from moaic.text.units import gib

LLAMA3: Final = {"num_key_value_heads": 8, "vocab_size": 128256}
MODELS: Final[Mapping[str, Mapping[str, int]]] = {
    "llama3-8b": {
        **LLAMA3,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "llama3-70b": {
        **LLAMA3,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "llama3-405b": {
        **LLAMA3,
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
    },
}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Case:
    """A model on many devices."""

    model: str
    machine: Machine
    batch: int
    sequence: int
    layers: int | None
    """Instead of the model's own."""
    processes: int

    @property
    def source(self) -> ModelSource:
        depth = {} if self.layers is None else {"num_hidden_layers": self.layers}
        if self.model in MODELS:
            return ModelSource("llama", {**MODELS[self.model], **depth})
        return ModelSource(self.model, depth)


def measured(case: Case) -> dict[str, Any]:
    """What planning this case takes, and what it finds."""
    # As where a step is compiled: the processes start while it is captured.
    pool = ProcessPool(case.processes)
    try:
        capture, step = timed(lambda: captured_step(case.source, Sample(case.batch, case.sequence, padding=False)))
        with TemporaryDirectory() as folder:
            cold, selection = timed(lambda: _selected(step, case, pool, Path(folder)))
            cached, _ = timed(lambda: _selected(step, case, pool, Path(folder)))
    finally:
        pool.close()
    result = selection.search_result
    chosen = result.of(result.selected)
    assert chosen.memory is not None
    assert chosen.prediction is not None
    seconds = chosen.prediction.seconds.value
    return {
        "capture_s": round(capture, 2),
        "search_s": round(cold, 2),
        "cached_s": round(cached, 2),
        "candidates": len(result.candidates),
        "priced": sum(each.memory is not None for each in result.candidates),
        "possible": len(result.ranked),
        "plan": str(result.selected),
        "step_s": seconds,
        "tokens_per_s": case.batch * case.sequence / seconds,
        "peak": gib(chosen.memory.peak),
        "sources": _shares(chosen.prediction),
    }


def _selected(step: Module, case: Case, pool: ProcessPool, folder: Path) -> Selection:
    return search_cached(step, case.machine, Request(), pool=pool, folder=folder, runs=False)


def _shares(prediction: Prediction) -> Mapping[str, str]:
    """By source of numbers, its share of the predicted time."""
    shares: dict[str, float] = defaultdict(float)
    for number in prediction.parts.values():
        shares[str(number.source)] += number.value / prediction.seconds.value
    return {source: f"{share:.0%}" for source, share in shares.items()}


def timed(work: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama3-8b", help=f"{', '.join(MODELS)}, or a folder with a config.json")
    parser.add_argument("--cluster", default="h100:256", help="a name and a number of devices, or a file")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    logging.getLogger("moaic").setLevel(logging.WARNING)
    cluster, workers = cluster_and_workers(chosen.cluster)
    case = Case(
        chosen.model, cluster.machine(workers or 1), chosen.batch, chosen.sequence, chosen.layers, chosen.processes
    )
    found = measured(case)
    for name, value in found.items():
        print(f"{name:>14}  {value}")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
