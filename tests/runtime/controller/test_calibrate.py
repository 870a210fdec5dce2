from __future__ import annotations

import json
from pathlib import Path

from moaic.runtime.controller import calibrate
from moaic.runtime.controller.accelerator import Accelerator
from moaic.runtime.host.flavors import this_host

FLAVOR = this_host({}).flavor(2)
COLLECTIVES = {"all_reduce", "reduce_scatter", "all_gather", "all_to_all"}


def test_every_rate_is_positive_and_says_where_it_comes_from(two: Accelerator) -> None:
    found = calibrate.measure(two, FLAVOR)
    assert found["workers"] == 2
    assert 1 << 28 < found["memory"] < 1 << 50
    numbers = [found["bandwidth"], found["call_overhead"], *found["flops"].values()]
    numbers += [link[name] for link in found["links"].values() for name in ("latency", "rate")]
    assert all(value > 0 and source in ("measured", "interpolated") for value, source in numbers)
    assert set(found["links"]) == COLLECTIVES
    assert {"mm.f32", "mm.bf16", "sdpa.f32", "convolution.f32", "cheap.f32", "costly.f32"} <= set(found["flops"])


def test_the_planner_reads_what_is_measured(two: Accelerator, tmp_path: Path) -> None:
    from moaic.passes.perf.machine_text import from_text

    first = calibrate.measured(two, FLAVOR, tmp_path)
    assert from_text(first).workers == 2
    (path,) = tmp_path.iterdir()
    # What was measured in quiet is taken as it is.
    path.write_text(json.dumps({**json.loads(first), "is_busy": False, "name": "kept"}), encoding="utf-8")
    assert json.loads(calibrate.measured(two, FLAVOR, tmp_path))["name"] == "kept"


def test_a_folder_that_cannot_be_written_to_is_no_reason_to_fail(two: Accelerator, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert json.loads(calibrate.measured(two, FLAVOR, tmp_path / "file"))["workers"] == 2
