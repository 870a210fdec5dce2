"""Rows of published throughput: the model, the plans that a row may mean, and what was measured.

What a row leaves open (rows of a micro-batch, recomputation, interleaving) is every value that is possible: the
prediction is that of the fastest plan that fits. A row that cannot be simulated says why.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import isqrt, log2
from pathlib import Path
from typing import Final

from moaic.capture.trace_only import ModelSource
from moaic.ir.errors import Diagnostic
from moaic.passes.config import Config, Distribute, Recompute
from moaic.predict.cluster_file import Cluster, read_cluster
from moaic.predict.named_clusters import FOLDER

Cells = Mapping[str, str]

ROWS: Final = Path(__file__).parent / "published.csv"

OWN_CLUSTERS: Final = Path(__file__).parent / "clusters"
"""Machines that only published rows are about."""

CLUSTERS: Final[Mapping[str, str]] = {
    "A100-40GB": "a100-40",
    "A100-80GB": "a100-80",
    "H100-96GB": "h100-96",
    "H100": "h100",
    "H200": "h200",
    "MI210": "mi210",
    "MI250X": "mi250x",
    "MI250": "mi250",
    "MI300X": "mi300x",
    "V100": "v100",
}
"""By the begin of a GPU's name; the first that fits."""

PEAKS: Final[Mapping[str, float]] = {
    "V100": 125e12,
    "A100": 312e12,
    "H100": 989e12,
    "H200": 989e12,
    "MI300X": 1307.4e12,
}
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

INTERLEAVE_NOTHING: Final = ("NT", "AL")
"""Sources whose software has no interleaved schedule."""

NARROW: Final = ("f8", "fp8", "float8")
"""What names of precisions contain whose products are of eight-bit floats."""

PRECISIONS: Final[Mapping[str, str]] = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "fp32": "float32",
    "float32": "float32",
}
"""Element types by what names of precisions contain; the first that fits."""

COLUMNS: Final = (
    *("id", "model", "params_b", "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "seq_len", "gpu"),
    *("gpus", "tp", "pp", "vpp", "cp", "ep", "dp", "zero_or_fsdp", "recompute(none|selective|full)", "precision"),
    *("micro_batch", "global_batch", "grad_accum", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "mem_gb"),
    *("compile_or_kernels(flash attn etc)", "notes"),
)

MOST_PARTS: Final = 1 << 14
"""Micro-batches of a plan that are simulated one by one."""

NEAR: Final = 0.25
"""Share by which the parameters of the form that is simulated may differ from those of the model."""


@dataclass(frozen=True, slots=True)
class Row:
    """One published measurement."""

    name: str
    model: ModelSource
    layers: int
    gpu: str
    """Name of its cluster."""
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
    note: str = ""
    """What is simulated otherwise than the row says."""

    @property
    def source(self) -> str:
        return source_of(self.name)

    @property
    def cluster(self) -> Cluster:
        return read_cluster(path_of(self.gpu))


@dataclass(frozen=True, slots=True)
class Skipped:
    """A row that is not simulated."""

    name: str
    reason: str


def path_of(gpu: str) -> Path:
    """The file of a cluster."""
    own = OWN_CLUSTERS / f"{gpu}.toml"
    return own if own.exists() else FOLDER / f"{gpu}.toml"


def source_of(name: str) -> str:
    return name.partition("-")[0]


def tables(path: Path) -> list[Cells]:
    """The rows of a file. Raises Diagnostic for one without the columns."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, restval="")
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise Diagnostic(f"{path} has no column `{missing[0]}`", hint=f"columns: {', '.join(COLUMNS)}")
            return [{key: (cells[key] or "").strip() for key in COLUMNS} for cells in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise Diagnostic(f"cannot read {path}: {error}") from None


def command_line(description: str | None) -> argparse.ArgumentParser:
    """The arguments of a command over rows."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("names", nargs="*", metavar="ROW", help="rows, or sources such as LF; all of them without any")
    parser.add_argument("--rows", type=Path, default=ROWS, help="a file with the columns of bench/published.csv")
    parser.add_argument("--json", type=Path)
    return parser


def wanted_rows(arguments: argparse.Namespace) -> list[Cells]:
    """The rows that a command is asked for; ends the program with a message where there is no such file."""
    try:
        table = tables(arguments.rows)
    except Diagnostic as error:
        sys.exit(str(error))
    names = set(arguments.names)
    return [each for each in table if not names or {each["id"], source_of(each["id"])} & names]


def is_accepted(cells: Cells) -> bool:
    """Whether a row is of quality A or A-, or says nothing of its quality."""
    quality = re.match(r"\[Q=(.)", cells["notes"])
    return quality is None or quality[1] == "A"


def row_of(cells: Cells) -> Row | Skipped:
    """What a row says."""
    try:
        return _row(cells)
    except Diagnostic as error:
        return Skipped(cells["id"], error.message)


def _row(cells: Cells) -> Row:
    gpu = next((name for begin, name in CLUSTERS.items() if cells["gpu"].startswith(begin)), None)
    if gpu is None:
        raise Diagnostic(f"no cluster is described for `{cells['gpu']}`")
    dtype = _dtype(cells["precision"])
    # A package of an MI250 is two devices; the column of GPUs counts packages, those of the plan count devices.
    dies = 2 if cells["gpu"] == "MI250" else 1
    mesh, sequence = _mesh(cells, _count(cells, "gpus") * dies), _count(cells, "seq_len")
    flops = 6 * _parameters(cells) + 12 * _count(cells, "layers") * _count(cells, "hidden") * sequence
    measured = _measured(cells, flops)
    if measured is None and "OOM" not in cells["notes"]:
        raise Diagnostic("it states neither throughput nor that memory ran out")
    return Row(
        cells["id"],
        _model(cells),
        _count(cells, "layers"),
        gpu,
        mesh.ranks,
        tuple(dict.fromkeys(_plans(cells, mesh))),
        cells["recompute(none|selective|full)"] == "selective",
        mesh.dp * mesh.rows,
        sequence,
        dtype,
        # One of the sources says in a note where weights, gradients and their sums are all narrow.
        dtype != "float32" and "PURE" not in cells["notes"],
        None if measured is None else measured / dies,
        _number(cells, "mem_gb") / dies if cells["mem_gb"] else None,
        flops,
        f"dp={mesh.stated} counts as {mesh.dp}" if mesh.dp != mesh.stated else "",
    )


def _dtype(precision: str) -> str:
    """The element type of a precision; a row without one is in bf16. Raises Diagnostic for one that has no price."""
    said = precision.lower()
    if any(word in said for word in NARROW):
        raise Diagnostic(f"products of eight-bit floats (`{precision}`) are not captured here")
    if "tf32" in said:
        raise Diagnostic(f"products of float32 in TF32 (`{precision}`) have no rate here")
    dtype = next((dtype for word, dtype in PRECISIONS.items() if word in said), "" if said else "bfloat16")
    if not dtype:
        raise Diagnostic(f"`{precision}` is no precision that is known", hint=f"known: {', '.join(PRECISIONS)}")
    return dtype


def _number(cells: Cells, column: str) -> float:
    try:
        number = float(cells[column])
    except ValueError:
        raise Diagnostic(f"`{column}` is `{cells[column]}`, no number") from None
    if not 0 < number < float("inf"):
        raise Diagnostic(f"`{column}` is `{cells[column]}`, no number above 0")
    return number


def _count(cells: Cells, column: str, default: int | None = None) -> int:
    if default is not None and not cells[column]:
        return default
    number = _number(cells, column)
    if number != int(number):
        raise Diagnostic(f"`{column}` is `{cells[column]}`, no whole number")
    return int(number)


@dataclass(frozen=True, slots=True)
class _Mesh:
    """Parts of the work of a step."""

    dp: int
    tp: int
    pp: int
    cp: int
    rows: int
    """Of each part of the batch."""
    stated: int
    """`dp` of the row."""

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp * self.cp


def _mesh(cells: Cells, workers: int) -> _Mesh:
    tp, pp, cp = (_count(cells, name, 1) for name in ("tp", "pp", "cp"))
    if _count(cells, "ep", 1) > 1:
        raise Diagnostic("mixtures of experts are not simulated here")
    dp = _count(cells, "dp", max(1, workers // (tp * pp * cp)))
    if dp * tp * pp * cp != workers:
        raise Diagnostic(f"dp={dp}, tp={tp}, pp={pp}, cp={cp} are not {workers} workers")
    batch = _batch(cells, dp)
    if batch % dp:
        raise Diagnostic(f"dp={dp} does not divide {batch} rows")
    if _shards(cells, dp) != "none" and any(_count(cells, name) % (dp * tp) for name in ("hidden", "vocab")):
        # Others cut the flat buffer of all parameters, which any number divides: a rank sends as much among 64 as 48.
        return _Mesh(2 ** round(log2(dp)), tp, pp, cp, batch // dp, dp)
    return _Mesh(dp, tp, pp, cp, batch // dp, dp)


def _batch(cells: Cells, dp: int) -> int:
    if cells["global_batch"]:
        return _count(cells, "global_batch")
    if cells["micro_batch"] and cells["grad_accum"]:
        return dp * _count(cells, "micro_batch") * _count(cells, "grad_accum")
    raise Diagnostic("`global_batch` is empty")


def _measured(cells: Cells, flops: float) -> float | None:
    """Tokens per second and GPU, as printed, or from the printed FLOPs or their share of the peak."""
    if cells["tokens_per_s_per_gpu"]:
        return _number(cells, "tokens_per_s_per_gpu")
    if cells["tflops_per_gpu"]:
        return _number(cells, "tflops_per_gpu") * 1e12 / flops
    peak = next((peak for gpu, peak in PEAKS.items() if cells["gpu"].startswith(gpu)), None)
    return _number(cells, "mfu") / 100 * peak / flops if cells["mfu"] and peak else None


def _parameters(cells: Cells) -> float:
    """Parameters, as printed, or of the form that is simulated. Raises Diagnostic where these are far apart."""
    layers, hidden, heads, words = (_count(cells, name) for name in ("layers", "hidden", "heads", "vocab"))
    inner, groups = _count(cells, "ffn_hidden", 4 * hidden), _count(cells, "kv_heads", heads)
    if hidden % heads or heads % groups:
        raise Diagnostic(f"hidden={hidden}, heads={heads}, kv_heads={groups} are no whole heads")
    matrices = 2 if _is_gpt(cells) else 3
    attention = 2 * hidden**2 * (1 + groups / heads)
    inside = layers * (attention + matrices * hidden * inner)
    stated = 1e9 * _number(cells, "params_b") if cells["params_b"] else inside + hidden * words
    if not inside * (1 - NEAR) < stated < (inside + 2 * hidden * words) * (1 + NEAR):
        form = "GPT" if _is_gpt(cells) else "Llama"
        raise Diagnostic(
            f"a {form} of these sizes has {inside / 1e9:.3g} B parameters in layers, not {stated / 1e9:.3g}"
        )
    return stated


def _is_gpt(cells: Cells) -> bool:
    return "GPT" in cells["model"] or "MPT" in cells["model"]


def _model(cells: Cells) -> ModelSource:
    """A model of such a form: GPT's, or Llama's."""
    layers, hidden, heads, words, length = (
        _count(cells, name) for name in ("layers", "hidden", "heads", "vocab", "seq_len")
    )
    inner = _count(cells, "ffn_hidden", 4 * hidden)
    attention = {} if _has_flash_attention(cells) else EAGER
    if _is_gpt(cells):
        sizes = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "n_inner": inner, "vocab_size": words}
        kept = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return ModelSource("gpt2", {**sizes, **kept, "n_positions": length, **attention})
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": words}
    more = {"num_key_value_heads": _count(cells, "kv_heads", heads), "intermediate_size": inner}
    return ModelSource("llama", {**sizes, **more, "max_position_embeddings": length, **attention})


EAGER: Final = {"attn_implementation": "eager"}


def _has_flash_attention(cells: Cells) -> bool:
    """Whether attention is one kernel; a run that does not name its attention and is in bf16 is younger than that."""
    kernels = cells["compile_or_kernels(flash attn etc)"].lower()
    if "no flash" in kernels:
        return False
    return "flash" in kernels or cells["precision"] != "fp16"


def _shards(cells: Cells, dp: int) -> Distribute:
    if dp == 1:
        return "none"
    return next(kind for word, kind in SHARDING if word in cells["zero_or_fsdp"])


def _plans(cells: Cells, mesh: _Mesh) -> Iterator[Config]:
    level = _shards(cells, mesh.dp)
    rows_of_part = [_count(cells, "micro_batch")] if cells["micro_batch"] else [1, 2, 4]
    modes = RECOMPUTE.get(cells["recompute(none|selective|full)"])
    if modes is None:
        raise Diagnostic(f"`{cells['recompute(none|selective|full)']}` is no recomputation that is known")
    for rows_of, mode in product(rows_of_part, modes):
        parts = _parts(mesh.rows, rows_of)
        if parts > MOST_PARTS:
            raise Diagnostic(
                f"{parts} micro-batches of {rows_of} rows are more than the {MOST_PARTS} that have a price"
            )
        for schedule in _schedules(cells, mesh.pp, parts):
            yield Config(
                dp=mesh.dp,
                tp=mesh.tp,
                pp=mesh.pp,
                cp=mesh.cp,
                micro_batches=parts,
                recompute=mode,
                distribute_param=level,
                distribute_low_prec_param=level in ("use", "step"),
                schedule=schedule,
            )


def _parts(rows: int, rows_of: int) -> int:
    """Micro-batches of about so many rows: the software of some sources lets the last one be smaller."""
    small = [n for n in range(1, isqrt(rows) + 1) if rows % n == 0]
    return min(sorted({*small, *(rows // n for n in small)}), key=lambda n: abs(log2(rows / n / rows_of)))


def _schedules(cells: Cells, pp: int, parts: int) -> Iterable[str]:
    """The schedules that a row may mean: an interleaved one takes micro-batches in rounds, and equal stages."""
    if pp == 1 or cells["vpp"] == "1" or cells["id"].startswith(INTERLEAVE_NOTHING) or parts % pp:
        return ["1f1b"]
    if cells["vpp"]:
        return [f"interleaved:{_count(cells, 'vpp')}"]
    return ["1f1b", *(f"interleaved:{stages}" for stages in (2, 4) if _count(cells, "layers") % (pp * stages) == 0)]
