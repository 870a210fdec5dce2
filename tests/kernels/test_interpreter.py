"""The kernels' own tests, in a process where Triton interprets kernels, and optionally PyTorch's, too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FOLDER = "tests/kernels/interpreted"
PARKED = "bench/parked_kernels"
"""Run together with the first, whose conftest prepares the process."""
CHECKS = ["-o", "python_files=check_*.py", "-o", "python_functions=check_*", "-p", "no:cacheprovider", "-q"]


def interpreted(*options: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", FOLDER, PARKED, *CHECKS, *options],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_kernels_compute_what_plain_pytorch_does() -> None:
    interpreted("--hypothesis-profile=quick", "-k", "not check_spoiled")


@pytest.mark.exact
@pytest.mark.timeout(1800)
def test_of_many_shapes_and_spoiled_kernels_are_found() -> None:
    interpreted("--hypothesis-profile=long")
