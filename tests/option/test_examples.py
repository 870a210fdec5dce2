"""Libraries that search for cuda themselves, by their examples: the losses of plain PyTorch, on two workers."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def losses(name: str, device: str, home: Path) -> list[float]:
    """What the example prints that starts in an empty home, on two workers that compile nothing."""
    ours = {"MOAI_FLAVOR": "2", "MOAI_COMPILE": "0", "MOAI_LOG": "warning", "HF_HUB_OFFLINE": "1", "HOME": str(home)}
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("MOAI_", "XDG_"))}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py"), device],
        cwd=home,
        env={**kept, **ours, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    word, *values = done.stdout.splitlines()[-1].split()
    assert word == "losses"
    return [float(value) for value in values]


@pytest.mark.exact
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="not installed: accelerate")
@pytest.mark.parametrize("name", ["hf_trainer", "accelerate_loop"])
def test_it_trains_as_on_the_cpu(name: str, tmp_path: Path) -> None:
    plain = losses(name, "cpu", tmp_path)
    assert losses(name, "moai", tmp_path) == pytest.approx(plain, rel=1e-5, abs=2e-6)
    assert min(plain) < plain[0]
