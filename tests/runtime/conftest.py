"""Workers for the tests of a module: real processes, started once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moaic.runtime.accelerator import Accelerator
from moaic.runtime.launch import launch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def two() -> Iterator[Accelerator]:
    yield from _accelerator(2)


@pytest.fixture(scope="module")
def four() -> Iterator[Accelerator]:
    yield from _accelerator(4)


def _accelerator(workers: int) -> Iterator[Accelerator]:
    accelerator = Accelerator(launch(workers))
    yield accelerator
    accelerator.close()


Script = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Starts a person's program, a text, as a process of its own."""

    def start(text: str) -> subprocess.Popen[str]:
        file = tmp_path / "script.py"
        file.write_text(text, encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "MOAI_FLAVOR": "2"}
        return subprocess.Popen(
            [sys.executable, str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )

    return start
