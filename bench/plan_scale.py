"""How long planning takes for a model on many devices: one case, none of its devices needed.

`python bench/plan_scale.py --model llama3-8b --cluster h100:256 --batch 512 --sequence 4096` prints seconds of capture
and of search (cold, and with the plan in the cache), how many candidates there are, how many were priced and how many
are possible, the selected plan, its predicted time and memory, and the sources of the time. `--json FILE` writes these.
Clusters are those of `moaic/predict/clusters`, or a file such as `cluster.toml`.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeVar

from moaic.capture.trace_only import ModelSource, Sample
from moaic.cli.exit_codes import WRONG
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.passes.config import Request
from moaic.passes.estimate.step_time import Prediction
from moaic.passes.perf.machine import Machine
from moaic.planner.plan_cache import search_cached
from moaic.planner.processes import ProcessPool
from moaic.planner.search import NoPlanFits, Selection
from moaic.predict.captured_step import captured_step
from moaic.predict.guide import enough_workers
from moaic.predict.named_clusters import cluster_and_workers, is_cluster, names
from moaic.runtime.host.cluster import EXAMPLE as HOST_EXAMPLE
from moaic.text.units import gib
from moaic.tools.command import CommandParser, answered, new_file, positive

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
    # As where a step is compiled for the first time: the processes start while it is captured.
    pool = ProcessPool(case.processes)
    pool.start()
    try:
        capture, step = timed(lambda: captured_step(case.source, Sample(case.batch, case.sequence, padding=False)))
        with TemporaryDirectory() as folder:
            cold, selection = timed(lambda: _fitting(step, case, pool, Path(folder)))
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


def _fitting(step: Module, case: Case, pool: ProcessPool, folder: Path) -> Selection:
    """The selected plan; where none fits, the message says on how many devices one does."""
    try:
        return _selected(step, case, pool, folder)
    except NoPlanFits as error:
        enough = enough_workers(step, case.machine, Request(), pool)
        error.message += f"; on {enough} devices one does" if enough else ""
        raise


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


def machine_of(text: str) -> Machine:
    """The machine of `h100:64` or `cluster.toml`. Raises Diagnostic."""
    if not is_cluster(text):
        raise Diagnostic(f"there is no cluster `{text}`", hint=f"choose one of {', '.join(names())}, or name a file")
    cluster, workers = cluster_and_workers(text)
    if workers is None:
        hint = HOST_EXAMPLE if Path(text).suffix == ".toml" else f"for example {text}:64"
        raise Diagnostic(f"`{text}` does not say how many devices there are", hint=hint)
    return cluster.machine(workers)


def run() -> int:
    """Measures the case of the command line; WRONG where no plan fits."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("--model", default="llama3-8b", help=f"{', '.join(MODELS)}, or a config.json or its folder")
    parser.add_argument("--cluster", default="h100:256", help="a name and a number of devices, or a file")
    parser.add_argument("--batch", type=positive, default=512)
    parser.add_argument("--sequence", type=positive, default=4096)
    parser.add_argument("--layers", type=positive, help="instead of the model's own number")
    parser.add_argument("--processes", type=positive, default=2)
    parser.add_argument("--json", type=new_file)
    chosen = parser.parse_args()
    logging.getLogger("moaic").setLevel(logging.WARNING)
    machine = machine_of(chosen.cluster)
    case = Case(chosen.model, machine, chosen.batch, chosen.sequence, chosen.layers, chosen.processes)
    try:
        found = measured(case)
    except NoPlanFits as error:
        print(f"error: {error.message}", file=sys.stderr)
        return WRONG
    for name, value in found.items():
        print(f"{name:>14}  {value}")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(answered(run))
