"""Libraries around PyTorch, each by its example: the losses of plain PyTorch, on two workers.

Each example runs as a program of its own in an empty home. The larger libraries are tried under the marker `exact`.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TRAIN = "import sys, json, {name}; print(json.dumps([{name}.train(device) for device in ('cpu', 'moai')]))"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Empty at first; what moaic finds out about the machine it keeps there."""
    return tmp_path_factory.mktemp("home")


def run(command: list[str], home: Path, **more: str) -> str:
    """What a program prints that starts in an empty home, with two workers that compile nothing."""
    ours = {"MOAI_FLAVOR": "2", "MOAI_COMPILE": "0", "MOAI_LOG": "warning", "HF_HUB_OFFLINE": "1", "HOME": str(home)}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MOAI_", "XDG_"))}
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    environment = {**kept, **ours, "PYTHONPATH": path, **more}
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wanted(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("tensorboard_log", marks=wanted("tensorboard")),
        pytest.param("distributed_checkpoint", marks=[pytest.mark.exact]),
        pytest.param("safetensors_weights", marks=[pytest.mark.exact]),
        pytest.param("peft_lora", marks=[wanted("peft"), pytest.mark.exact]),
        pytest.param("lightning_fit", marks=[wanted("lightning"), pytest.mark.exact]),
        pytest.param("trl_sft", marks=[wanted("trl"), pytest.mark.exact]),
    ],
)
def test_an_example_trains_as_plain_pytorch_does(name: str, home: Path) -> None:
    printed = run([sys.executable, "-c", TRAIN.format(name=name)], home)
    plain, ours = json.loads(printed.splitlines()[-1])
    assert ours == pytest.approx(plain, rel=1e-5)
    assert min(plain) < plain[0]


@pytest.mark.exact
@wanted("nbclient", "ipykernel")
def test_the_notebook_runs(home: Path) -> None:
    shown = run([sys.executable, str(ROOT / "examples" / "run_notebook.py")], home, MOAI_PLAN="dp=2")
    assert "torch.Size([128, 1])" in shown
    assert "device='moai:0'" in shown
    assert "'dp=2" in shown


def test_a_profile_shows_every_worker(home: Path) -> None:
    script = str(ROOT / "examples" / "profile_steps.py")
    printed = run([sys.executable, script, "trace.json.gz"], home, MOAI_PLAN="dp=2")
    assert len(printed.splitlines()) == 2
    trace = json.loads(gzip.decompress((home / "trace.json.gz").read_bytes()))
    tracks = {rank: done(trace, f"moai worker {rank}") for rank in range(2)}
    host = [event for event in trace["traceEvents"] if event.get("cat") == "cpu_op"]
    for events in tracks.values():
        assert {event["cat"] for event in events} == {"compute", "communicate", "command"}
        assert any(event["name"] == "moai.reduce_scatter" or event["name"] == "moai.all_reduce" for event in events)
        # One clock: what workers do, they do while the profiler of this process looks on.
        assert min(event["ts"] for event in host) <= min(event["ts"] for event in events)
        assert all(one["ts"] + one["dur"] <= other["ts"] + 1 for one, other in pairwise(events))


def done(trace: Mapping[str, Any], track: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event.get("pid") == track and event["ph"] == "X"]
