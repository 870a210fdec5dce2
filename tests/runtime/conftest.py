"""Workers for the tests of a module: real processes, started once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from moaic.runtime.controller.accelerator import Accelerator
from moaic.runtime.controller.launch import launch
from moaic.runtime.protocol.carrier import Carrier

ROOT = Path(__file__).resolve().parents[2]


CARRIERS = [Carrier.MEMORY, pytest.param(Carrier.GLOO, marks=pytest.mark.exact)]
"""What carries data between the workers: every test of them is run over each."""


@pytest.fixture(scope="module", params=CARRIERS)
def two(request: pytest.FixtureRequest) -> Iterator[Accelerator]:
    yield from _accelerator(2, request.param)


@pytest.fixture(scope="module", params=CARRIERS)
def four(request: pytest.FixtureRequest) -> Iterator[Accelerator]:
    yield from _accelerator(4, request.param)


def _accelerator(workers: int, carrier: Carrier) -> Iterator[Accelerator]:
    accelerator = Accelerator(launch(workers, {"MOAI_COMPILE": "0"}, carrier=carrier))
    yield accelerator
    accelerator.close()


@dataclass
class Script:
    """A person's program as a process of its own, and how it went."""

    folder: Path
    text: str = ""
    process: subprocess.Popen[str] | None = None

    def start(self, text: str, **variables: str) -> list[str]:
        """Starts the program; the words of the first line that it prints."""
        self.text = text
        file = self.folder / "script.py"
        file.write_text(text, encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "MOAI_FLAVOR": "2", "MOAI_COMPILE": "0", **variables}
        self.process = subprocess.Popen(
            [sys.executable, str(file)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        return self.line().split()

    def line(self) -> str:
        """The next line that the program prints."""
        assert self.process is not None
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def finish(self) -> str:
        """What else the program prints until it ends, which must be well."""
        assert self.process is not None
        printed, _ = self.process.communicate(timeout=280)
        assert self.process.returncode == 0, printed
        return printed

    def place(self, piece: str) -> str:
        """`script.py:line` of the line that contains `piece`."""
        lines = self.text.splitlines()
        return f"script.py:{1 + next(index for index, line in enumerate(lines) if piece in line)}"


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    program = Script(tmp_path)
    yield program
    if program.process is not None:
        program.process.kill()
        program.process.communicate()
