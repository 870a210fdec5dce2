"""Rows of published throughput: the model, the plans that a row may mean, and what was measured.

What a row leaves open (rows of a micro-batch, recomputation, interleaving) is every value that is possible: the
prediction is that of the fastest plan that fits.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Final

from moaic.capture.trace_only import ModelSource
from moaic.passes.config import Config, Distribute, Recompute

Cells = Mapping[str, str]

CLUSTERS: Final[Mapping[str, str]] = {
    "A100-40GB": "a100-40",
    "A100-80GB": "a100-80",
    "H100-80GB": "h100",
    "H200-141GB": "h200",
    "MI250": "mi250",
    "MI300X": "mi300x",
}

PEAKS: Final[Mapping[str, float]] = {"A100": 312e12, "H100": 989e12}
"""FLOPs per second by which sources state utilization."""

SHARDING: Final[Sequence[tuple[str, Distribute]]] = (
    ("ZeRO-3", "use"),
    ("ZeRO-0", "none"),
    ("DDP", "none"),
    ("", "step"),
)
"""By what the column contains, how parameters are sharded.

ZeRO-1 and 2 keep narrow copies of all parameters, which they gather once per step, and share out those in float32.
"""

RECOMPUTE: Final[Mapping[str, Sequence[Recompute]]] = {
    "none": ("saved",),
    "selective": ("saved",),
    "full": ("full",),
    "": ("saved", "full"),
}


NAMED: Final[Mapping[str, str]] = {
    "LF-021": "30 B on eight GPUs, rows of 8,192 tokens one by one: at the limit of memory",
    "LF-080": "the same on A100",
    "LF-179": "far below all its neighbours in the same table",
    "NT-020": "far below what its source measured on as many GPUs otherwise",
}
"""Rows left out of the fit, and shown apart: the last two are outliers among their own source's rows."""

INTERLEAVE_NOTHING: Final = ("NT-",)
"""Rows of sources whose software has no interleaved schedule."""


@dataclass(frozen=True, slots=True)
class Row:
    """One published measurement."""

    name: str
    model: ModelSource
    layers: int
    cluster: str
    workers: int
    plans: tuple[Config, ...]
    """Every plan that the row may mean."""
    is_selective: bool
    """Whether some of the forward is recomputed; its plans recompute nothing."""
    batch: int
    sequence: int
    dtype: str
    """Element type of all that is computed."""
    has_masters: bool
    """Whether parameters and their gradients are kept in float32 beside that."""
    tokens: float | None
    """Tokens per second and worker; None where the run was out of memory."""
    memory: float | None
    """GB per worker."""
    flops: float
    """FLOPs of the model per token, by the formula of most sources: 6 N + 12 L h s."""

    @property
    def source(self) -> str:
        return self.name.partition("-")[0]


def rows(path: Path) -> Iterator[Row]:
    """The rows that state a plan, on devices that are known."""
    with path.open(encoding="utf-8", newline="") as file:
        for cells in csv.DictReader(file):
            if (row := _row(cells)) is not None:
                yield row


def _row(cells: Cells) -> Row | None:
    quality = re.match(r"\[Q=(A-?)\]", cells["notes"])
    cluster = next((name for gpu, name in CLUSTERS.items() if cells["gpu"].startswith(gpu)), None)
    if quality is None or cluster is None or not cells["global_batch"]:
        return None
    # A package of an MI250 is two devices; the column of GPUs counts packages, those of the plan count devices.
    dies = 2 if cells["gpu"] == "MI250" else 1
    workers, batch, sequence = int(cells["gpus"]) * dies, int(cells["global_batch"]), int(cells["seq_len"])
    flops = 6e9 * float(cells["params_b"]) + 12 * int(cells["layers"]) * int(cells["hidden"]) * sequence
    measured = _measured(cells, flops)
    if measured is None and "OOM" not in cells["notes"]:
        return None
    return Row(
        cells["id"],
        _model(cells),
        int(cells["layers"]),
        cluster,
        workers,
        tuple(_plans(cells, workers, batch)),
        cells["recompute(none|selective|full)"] == "selective",
        batch,
        sequence,
        "float16" if cells["precision"] == "fp16" else "bfloat16",
        # One of the sources says in a note where weights, gradients and their sums are all narrow.
        "PURE" not in cells["notes"],
        None if measured is None else measured / dies,
        float(cells["mem_gb"]) / dies if cells["mem_gb"] else None,
        flops,
    )


def _measured(cells: Cells, flops: float) -> float | None:
    """Tokens per second and GPU, as printed, or from the printed FLOPs or their share of the peak."""
    if cells["tokens_per_s_per_gpu"]:
        return float(cells["tokens_per_s_per_gpu"])
    if cells["tflops_per_gpu"]:
        return float(cells["tflops_per_gpu"]) * 1e12 / flops
    peak = next((peak for gpu, peak in PEAKS.items() if cells["gpu"].startswith(gpu)), None)
    return float(cells["mfu"]) / 100 * peak / flops if cells["mfu"] and peak else None


def _model(cells: Cells) -> ModelSource:
    """A model of such a form: GPT's, or Llama's."""
    layers, hidden, heads, words, length = (
        int(cells[name]) for name in ("layers", "hidden", "heads", "vocab", "seq_len")
    )
    inner = int(cells["ffn_hidden"] or 4 * hidden)
    attention = {} if "flash" in cells["compile_or_kernels(flash attn etc)"].lower() or _is_recent(cells) else EAGER
    if "GPT" in cells["model"] or "MPT" in cells["model"]:
        sizes = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "n_inner": inner, "vocab_size": words}
        kept = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return ModelSource("gpt2", {**sizes, **kept, "n_positions": length, **attention})
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": words}
    more = {"num_key_value_heads": int(cells["kv_heads"]), "intermediate_size": inner}
    return ModelSource("llama", {**sizes, **more, "max_position_embeddings": length, **attention})


EAGER: Final = {"attn_implementation": "eager"}


def _is_recent(cells: Cells) -> bool:
    """Whether a run that does not name its attention is younger than flash attention."""
    return cells["precision"] != "fp16"


def _plans(cells: Cells, workers: int, batch: int) -> Iterator[Config]:
    tp, pp = int(cells["tp"]), int(cells["pp"])
    dp = int(cells["dp"] or workers // (tp * pp))
    level: Distribute = "none"
    if dp > 1:
        level = next(kind for word, kind in SHARDING if word in cells["zero_or_fsdp"])
    rows_of_part = [int(cells["micro_batch"])] if cells["micro_batch"] else [1, 2]
    modes = RECOMPUTE[cells["recompute(none|selective|full)"]]
    for rows_of, mode, schedule in product(rows_of_part, modes, _schedules(cells, pp)):
        # Two sources let the last micro-batch be smaller, which counts as one of the usual size.
        parts = max(1, round(batch / dp / rows_of))
        if batch % (dp * parts) == 0:
            yield Config(
                dp=dp,
                tp=tp,
                pp=pp,
                micro_batches=parts,
                recompute=mode,
                distribute_param=level,
                distribute_low_prec_param=level in ("use", "step"),
                schedule=schedule,
            )


def _schedules(cells: Cells, pp: int) -> Iterable[str]:
    if pp == 1 or cells["vpp"] == "1" or cells["id"].startswith(INTERLEAVE_NOTHING):
        return ["1f1b"]
    return ["interleaved"] if cells["vpp"] else ["1f1b", "interleaved"]
