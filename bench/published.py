"""Predictions for GPUs beside throughput published by others: the planner's error where moaic was not measured.

`python bench/published.py [ROW…]` reads `bench/published.csv`: trainings on one host under plans that moaic has, with
attention in one kernel, from sources that state all parameters. Machines are those of data sheets
(`moaic.predict.gpu_machine`).
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean, stdev
from typing import Final

import torch

from moaic.capture.trace_only import ModelSource, Sample, take_model
from moaic.ir.graph import Module
from moaic.passes.config import Config, Recompute
from moaic.passes.registry import run_passes
from moaic.planner.worker import Compiler
from moaic.predict.gpu_machine import machine_of
from moaic.runtime.host.gpu_specs import TARGETS

ROWS: Final = Path(__file__).parent / "published.csv"

ELEMENTS: Final[Mapping[str, torch.dtype]] = {"bf16": torch.bfloat16, "fp16": torch.float16}

RECOMPUTE: Final[Mapping[str, Recompute]] = {"none": "saved", "full": "full"}


@dataclass(frozen=True, slots=True)
class Row:
    """One published measurement: the model, the plan, and tokens per second and GPU."""

    name: str
    model: str
    source: ModelSource
    target: str
    config: Config
    elements: torch.dtype
    batch: int
    """Rows of the whole of it."""
    sequence: int
    measured: float

    @property
    def gpus(self) -> int:
        return self.config.ranks


def rows() -> list[Row]:
    with ROWS.open(encoding="utf-8", newline="") as file:
        return [_row(cells) for cells in csv.DictReader(file)]


def _row(cells: Mapping[str, str]) -> Row:
    dp, tp, parts = (int(cells[name]) for name in ("dp", "tp", "micro_batches"))
    is_sharded = cells["sharded"] == "yes"
    config = Config(
        dp=dp,
        tp=tp,
        micro_batches=parts,
        recompute=RECOMPUTE[cells["recompute"]],
        distribute_param="use" if is_sharded else "none",
        distribute_low_prec_param=is_sharded,
    )
    return Row(
        cells["id"],
        cells["model"],
        _source(cells),
        cells["target"],
        config,
        ELEMENTS[cells["elements"]],
        int(cells["rows"]) * dp * parts,
        int(cells["sequence"]),
        float(cells["tokens_per_s_per_gpu"]),
    )


def _source(cells: Mapping[str, str]) -> ModelSource:
    """A model of such a form: GPT's, or Llama's."""
    layers, hidden, heads, inner, words, length = (
        int(cells[name]) for name in ("layers", "hidden", "heads", "ffn_hidden", "vocab", "sequence")
    )
    if cells["family"] == "llama":
        sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
        more = {"num_key_value_heads": int(cells["kv_heads"]), "intermediate_size": inner, "vocab_size": words}
        return ModelSource("llama", {**sizes, **more, "max_position_embeddings": length})
    sizes = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "n_inner": inner, "vocab_size": words}
    kept = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return ModelSource("gpt2", {**sizes, **kept, "n_positions": length})


def predicted(row: Row) -> float:
    """Tokens per second and GPU."""
    torch.compiler.reset()
    with torch.autocast("cpu", row.elements):
        taken = take_model(row.source, Sample(row.batch, row.sequence, padding=False))
    step = run_passes(Module((taken.captured.function,)), "zero")
    # Whether it fits was seen when it was measured.
    machine = replace(machine_of(TARGETS[row.target], row.gpus, {}), memory=sys.maxsize)
    compiler = Compiler(step, machine)
    made = compiler.compile(row.config)
    assert made.memory is not None, made
    seconds = compiler.cost(row.config).seconds.value
    return row.batch * row.sequence / seconds / row.gpus


def report(found: Iterable[tuple[Row, float]]) -> Iterable[str]:
    """A line of a table as each row is known, then what all say together."""
    yield "| row | model | GPU | plan | tokens in a row | measured | predicted | ratio |"
    yield "| --- | --- | --- | --- | ---: | ---: | ---: | ---: |"
    ratios: list[float] = []
    for row, tokens in found:
        ratios.append(tokens / row.measured)
        words = (row.name, row.model, TARGETS[row.target].device, str(row.config), f"{row.sequence:,}")
        figures = (f"{row.measured:,.0f}", f"{tokens:,.0f}", f"{ratios[-1]:.2f}")
        yield f"| {' | '.join((*words, *figures))} |"
    if len(ratios) > 1:
        yield (
            f"\n{len(ratios)} rows: predicted / measured is {geometric_mean(ratios):.2f} in the mean, from "
            f"{min(ratios):.2f} to {max(ratios):.2f}, with a standard deviation of {stdev(ratios):.2f}"
        )


def main(names: list[str]) -> None:
    chosen = [row for row in rows() if not names or row.name in names]
    for line in report((row, predicted(row)) for row in chosen):
        print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
