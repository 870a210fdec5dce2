"""Workers for the tests of a module: real processes, started once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from moaic.runtime.accelerator import Accelerator
from moaic.runtime.buffer import Buffer, whole
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


def uploaded(accelerator: Accelerator, tensor: torch.Tensor, dtype: str = "f32") -> Buffer:
    """A new buffer with the value of `tensor`, in its memory order."""
    buffer = accelerator.buffer(dtype, tuple(tensor.shape), tensor.stride())
    accelerator.upload(buffer, tensor)
    return buffer


def value(accelerator: Accelerator, buffer: Buffer) -> torch.Tensor:
    return accelerator.download(whole(buffer))


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


def workers_of(text: str) -> list[int]:
    """The process ids that a script printed as `workers [..]`."""
    found = re.search(r"workers \[([\d, ]*)\]", text)
    assert found, text
    return [int(number) for number in found[1].split(",")]
