"""A user of the tests: private folders, and programs that use them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Person:
    """Someone with an empty home, and what they start."""

    home: Path
    cache: Path
    """Shared by the tests of a run: what a machine is like takes a while to measure."""
    programs: list[subprocess.Popen[str]] = field(default_factory=list[subprocess.Popen[str]])

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        return {
            **kept,
            "HOME": str(self.home),
            "XDG_RUNTIME_DIR": str(self.home),
            "PYTHONPATH": str(ROOT),
            "MOAI_CACHE": str(self.cache),
            "MOAI_COMPILE": "0",
            "COLUMNS": "100",
        }

    @property
    def flavors_file(self) -> Path:
        return self._configuration / "flavors.toml"

    @property
    def cluster_file(self) -> Path:
        return self._configuration / "cluster.toml"

    @property
    def _configuration(self) -> Path:
        folder = self.home / ".config" / "moai"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def runtime_files(self) -> set[str]:
        """What running programs have left to be seen."""
        return {path.name for path in (self.home / "moai").glob("*")}

    def command(self, module: str, *arguments: str) -> list[str]:
        code = f"import sys; from {module} import main; sys.exit(main(sys.argv[1:]))"
        return [sys.executable, "-c", code, *arguments]

    def ask(self, tool: str, *arguments: str, typed: str = "", **more: str) -> subprocess.CompletedProcess[str]:
        """Runs `smi` or `switch_model`."""
        command = self.command(f"moaic.tools.{tool}", *arguments)
        environment = {**self.environment, **more}
        return subprocess.run(command, input=typed, env=environment, capture_output=True, text=True, check=False)

    def start(self, text: str, **more: str) -> subprocess.Popen[str]:
        """Starts a program of theirs."""
        file = self.home / "train.py"
        file.write_text(text, encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**self.environment, **more},
        )
        self.programs.append(process)
        return process


@pytest.fixture
def person(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Person]:
    made = Person(tmp_path, tmp_path_factory.getbasetemp() / "cache")
    yield made
    for program in made.programs:
        program.kill()
        program.communicate()


def line(process: subprocess.Popen[str]) -> str:
    """The next line that a program prints."""
    assert process.stdout is not None
    return process.stdout.readline()
