from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from moaic.runtime.controller import calibrate
from moaic.runtime.controller.accelerator import Accelerator
from moaic.runtime.controller.errors import WorkerError
from moaic.runtime.controller.kernel_timing import MOST_REPEATS, kernel_seconds, seconds_to_time
from moaic.runtime.host.flavors import HostShare, this_host
from moaic.runtime.host.folders import cluster_file

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
    assert {"mm.f32", "mm.bf16", "sdpa.f32", "convolution.f32", "costly.f32"} <= set(found["flops"])


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


@pytest.mark.parametrize(
    "text",
    [
        "func @kernel(%0: f32[64, 96], %1: f32[96, 32]) -> (f32[64, 32]) {\n"
        "  %2 = aten.mm %0, %1 : f32[64, 32]\n  return %2\n}\n",
        "func @kernel(%0: f32[2, 4, 16, 8], %1: bool[2, 1, 16, 16]) -> (f32[2, 4, 16, 8], f32[2, 4, 16]) {\n"
        "  %2, %3 = moai.sdpa %0, %0, %0, %1 {scale = 0.5} : f32[2, 4, 16, 8], f32[2, 4, 16]\n  return %2, %3\n}\n",
    ],
    ids=["product", "attention"],
)
def test_a_kernel_is_timed_alone(two: Accelerator, text: str) -> None:
    assert 0 < kernel_seconds(two, text, 1e-5) < 1
    assert seconds_to_time(two, 1e-5) == pytest.approx(3 * MOST_REPEATS * 1e-5)
    assert seconds_to_time(two, 1.0) == 2


def test_a_kernel_that_cannot_run_leaves_the_workers_as_they_were(two: Accelerator) -> None:
    huge = 1 << 40
    text = f"func @kernel(%0: f32[1]) -> (f32[{huge}]) {{\n  %1 = aten.expand %0 {{size = [{huge}]}} : f32[{huge}]\n"
    text += f"  %2 = aten.clone %1 : f32[{huge}]\n  return %2\n}}\n"
    with pytest.raises(WorkerError, match="memory"):
        kernel_seconds(two, text, 1e-5)
    two.synchronize()
    assert two.stats().workers[0].buffers == 0


def test_what_carries_data_between_hosts_is_part_of_a_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    flavor = replace(FLAVOR, hosts=(HostShare("node2", "10.0.0.2", 1),))
    file, found = cluster_file(os.environ), set[str]()
    file.parent.mkdir(parents=True)
    for trusted in ("false", "true"):
        file.write_text(f'[cluster]\nlauncher = "ssh"\ntrusted_network = {trusted}\n', encoding="utf-8")
        found.add(calibrate.fingerprint(flavor))
    assert len(found) == 2


def test_only_old_measurements_are_dropped(tmp_path: Path) -> None:
    assert not calibrate.drop(tmp_path, FLAVOR, calibrate.OLD)
    path = tmp_path / f"machine-{calibrate.fingerprint(FLAVOR)}.json"
    path.write_text("{}", encoding="utf-8")
    assert not calibrate.drop(tmp_path, FLAVOR, calibrate.OLD)
    os.utime(path, (0, 0))
    assert calibrate.drop(tmp_path, FLAVOR, calibrate.OLD)
    assert not path.exists()
