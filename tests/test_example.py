from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "examples" / "train_llama2.py"
SMALL = ("--hidden", "64", "--intermediate", "128", "--layers", "2", "--heads", "4", "--batch", "4", "--seq", "32")


def train(device: str, folder: Path) -> tuple[dict[str, Any], str]:
    """The figures and the printed text of a small run, saved and checked in plain transformers."""
    figures = folder / f"{device}.json"
    outputs = ("--steps", "4", "--json", str(figures), "--save", str(folder / device))
    command = [sys.executable, str(SCRIPT), "--device", device, *SMALL, *outputs]
    environment = {**os.environ, "MOAI_COMPILE": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(figures.read_text(encoding="utf-8")), done.stdout


@pytest.mark.slow
def test_the_example_trains_alike_on_both_devices(tmp_path: Path) -> None:
    plain, _ = train("cpu", tmp_path)
    ours, printed = train("moai", tmp_path)
    theirs = [step["loss"] for step in plain["steps"]]
    assert [step["loss"] for step in ours["steps"]] == pytest.approx(theirs, rel=1e-5)
    assert theirs[-1] < theirs[0]
    assert ours["plan"]
    assert set(ours["timings"]) == {"capture_s", "planning_s", "compile_s"}
    assert "in plain transformers" in printed
