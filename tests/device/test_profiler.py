"""`torch.moai.profiler`: a track per worker in the trace that PyTorch writes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moaic.device import torch_module

moai: Any = torch.get_device_module("moai")


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_shows_what_every_worker_did(name: str, tmp_path: Path) -> None:
    x = torch.ones(8, 8, device="moai")
    torch_module.synchronize()
    with moai.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        (x @ x).sum().item()
    path = tmp_path / name
    profile.export_chrome_trace(str(path))
    written = path.read_bytes()
    events = json.loads(gzip.decompress(written) if name.endswith("gz") else written)["traceEvents"]
    operators = [event["ts"] for event in events if event.get("cat") == "cpu_op"]
    assert operators
    for rank in range(2):
        track = [event for event in events if event.get("pid") == f"moai worker {rank}"]
        assert [event["args"]["name"] for event in track if event["ph"] == "M"] == [f"moai worker {rank}"]
        spans = [event for event in track if event["ph"] == "X"]
        assert {"aten.mm", "aten.sum"} <= {event["name"] for event in spans}
        assert all(event["cat"] == "command" and event["dur"] >= 0 for event in spans)
        assert min(event["ts"] for event in spans) >= min(operators)
