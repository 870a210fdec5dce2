"""A process of the pool: without torch, and at rest when its work is done."""

from __future__ import annotations

import io
import json
import queue
import subprocess
import sys
import time

import pytest

from moaic.ir.printer import render
from moaic.passes.perf import machine_text
from moaic.planner.worker import serve
from tests.passes.steps import dense, machine


def test_a_pool_process_knows_no_torch_and_starts_at_once() -> None:
    code = "import sys, moaic.planner.worker; sys.exit('torch' in sys.modules)"
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    assert time.perf_counter() - start < 10


def test_a_process_rests_when_its_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moaic.planner.worker.REST_SECONDS", 0.01)
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    requests.put(json.dumps({"step": render(dense()), "machine": machine_text.to_text(machine())}))
    serve(requests, io.StringIO())
