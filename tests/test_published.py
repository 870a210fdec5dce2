"""`bench/published.py`: what rows mean, what is said of those that cannot be simulated, and the fit of constants."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from published_fit import left_out
from published_pricing import CONSTANTS, Finding
from published_rows import COLUMNS, Row, Skipped, command_line, is_accepted, row_of, tables, wanted_rows

ROOT = Path(__file__).parent.parent

CELLS: Mapping[str, str] = {
    **dict.fromkeys(COLUMNS, ""),
    "id": "XX-001",
    "model": "Llama-1B",
    "params_b": "1.1",
    "layers": "16",
    "hidden": "2048",
    "heads": "32",
    "kv_heads": "8",
    "ffn_hidden": "8192",
    "vocab": "32000",
    "seq_len": "4096",
    "gpu": "H100-80GB-SXM",
    "gpus": "16",
    "tp": "1",
    "pp": "1",
    "dp": "16",
    "zero_or_fsdp": "FSDP (ZeRO-3)",
    "precision": "bf16",
    "micro_batch": "1",
    "global_batch": "32",
    "recompute(none|selective|full)": "none",
    "tokens_per_s_per_gpu": "20000",
    "notes": "[Q=A] measured",
}


def read(**changes: str) -> Row | Skipped:
    return row_of({**CELLS, **changes})


def test_a_row_means_a_plan() -> None:
    row = read()
    assert isinstance(row, Row)
    (plan,) = row.plans
    assert str(plan) == "dp=16,micro_batches=2,distribute_param=use,distribute_low_prec_param=true"
    assert (row.workers, row.batch, row.tokens) == (16, 32, 20000)


def test_empty_cells_mean_every_possible_value() -> None:
    row = read(micro_batch="", tp="", pp="2", dp="", zero_or_fsdp="")
    assert isinstance(row, Row)
    assert {(plan.dp, plan.micro_batches, plan.schedule) for plan in row.plans} == {
        *((8, parts, schedule) for parts in (4, 2) for schedule in ("1f1b", "interleaved:2", "interleaved:4")),
        (8, 1, "1f1b"),
    }
    assert {plan.recompute for plan in row.plans} == {"saved"}


def test_parts_that_divide_no_dim_are_those_of_the_next_power_of_two() -> None:
    row = read(gpus="12", dp="12", global_batch="24")
    assert isinstance(row, Row)
    assert (row.workers, row.batch, row.plans[0].dp, row.note) == (16, 32, 16, "dp=12 counts as 16")


@pytest.mark.parametrize(
    ("precision", "dtype", "has_masters"),
    [("", "bfloat16", True), ("amp_bf16", "bfloat16", True), ("FP16", "float16", True), ("fp32", "float32", False)],
)
def test_a_row_is_computed_in_its_own_precision(precision: str, dtype: str, has_masters: bool) -> None:
    row = read(precision=precision)
    assert isinstance(row, Row)
    assert (row.dtype, row.has_masters, row.note) == (dtype, has_masters, "")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpu": "TPU v5p"}, "no cluster is described for `TPU v5p`"),
        ({"gpus": "many"}, "`gpus` is `many`, no number"),
        ({"gpus": "-8"}, "`gpus` is `-8`, no number above 0"),
        ({"layers": ""}, "`layers` is ``, no number"),
        ({"layers": "2.5"}, "`layers` is `2.5`, no whole number"),
        ({"tp": "3", "dp": ""}, "dp=5, tp=3, pp=1, cp=1 are not 16 workers"),
        ({"global_batch": ""}, "`global_batch` is empty"),
        ({"global_batch": "1e9"}, "62500000 micro-batches of 1 rows are more than the 16384 that have a price"),
        ({"global_batch": "33"}, "dp=16 does not divide 33 rows"),
        ({"precision": "FP8"}, "products of eight-bit floats (`FP8`) are not captured here"),
        ({"precision": "TF32"}, "products of float32 in TF32 (`TF32`) have no rate here"),
        ({"precision": "int4"}, "`int4` is no precision that is known"),
        ({"ep": "8"}, "mixtures of experts are not simulated here"),
        ({"params_b": "47"}, "a Llama of these sizes has 0.973 B parameters in layers, not 47"),
        ({"kv_heads": "5"}, "hidden=2048, heads=32, kv_heads=5 are no whole heads"),
        ({"tokens_per_s_per_gpu": ""}, "it states neither throughput nor that memory ran out"),
        ({"recompute(none|selective|full)": "some"}, "`some` is no recomputation that is known"),
    ],
)
def test_a_row_that_cannot_be_simulated_says_why(changes: Mapping[str, str], reason: str) -> None:
    assert read(**changes) == Skipped("XX-001", reason)


def test_every_accepted_row_of_the_file_is_simulated() -> None:
    cells = tables(ROOT / "bench" / "published.csv")
    accepted = [row_of(each) for each in cells if is_accepted(each)]
    assert len(accepted) == 162
    assert all(isinstance(row, Row) for row in accepted)


def test_a_file_of_strange_rows_has_a_line_for_each(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    with file.open("w", encoding="utf-8", newline="") as opened:
        writer = csv.DictWriter(opened, COLUMNS)
        writer.writeheader()
        writer.writerows([{**CELLS, "gpu": "TPU"}, {**CELLS, "id": "XX-002", "notes": "[Q=B] rounded"}])
    command = [sys.executable, str(ROOT / "bench" / "published.py"), "--rows", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "1 of 2 rows are left out: their quality is neither A nor A-." in done.stdout
    assert "XX-001 cannot be simulated: no cluster is described for `TPU`" in done.stdout
    file.write_text("id,model\nXX-001,Llama\n", encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        wanted_rows(command_line(None).parse_args(command[2:]))
    assert str(ended.value).splitlines()[0] == f"error: {file} has no column `params_b`"


def test_a_source_is_predicted_by_the_constants_of_the_others() -> None:
    shares = {**dict.fromkeys(CONSTANTS, 0.0), "matmul": 0.8}
    # All of both sources are 16 % faster than predicted, which products that take 0.8 of their time explain.
    one = Finding("AA-001", "AA", "h100", "dp=8", 100.0, 116.0, 1.0, None, fits=True, flops=1.0, shares=shares)
    rows = [replace(one, row=f"{source}-{at:03}", source=source) for source in ("AA", "BB") for at in range(50)]
    assert all(abs(error) < 0.01 for _, error in left_out(rows))
    assert one.error == pytest.approx(-0.138, abs=1e-3)
