"""Data tests: every `tests/**/*.moai` file with a RUN line is a test.

A file holds one or more lines `// RUN: [not] moaic ARGS [| filecheck [FLAGS]]`, in which `%s` is the file. The
command line runs in process; `not` wants exit code 2, which is how moaic reports a person's mistake. What it printed,
standard output before standard error, is matched against the CHECK lines of the file. A file of mistakes is cut at
lines `// -----`: each piece is run by the first piece's commands and matched against its own CHECK lines.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from filecheck.finput import FInput
from filecheck.matcher import Matcher
from filecheck.options import parse_argv_options
from filecheck.parser import Parser
from hypothesis import settings

from moaic.cli import MISTAKE, main
from moaic.planner.processes import ProcessPool

RUN = "// RUN:"
CUT = "// -----\n"
# Imports make no garbage.
gc.disable()
# A shell that starts something in the background has it ignore Ctrl-C, and so would the programs of the tests.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Steps that change over to compiled functions at a time of their own have other last bits in every run.
os.environ.setdefault("MOAI_COMPILE", "wait")
# After each of thousands of small graphs Dynamo would collect garbage.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("new", deadline=None)


def pytest_configure(config: pytest.Config) -> None:
    """Try new examples in the long proofs only: a change must not fail for what it has not touched."""
    settings.load_profile("new" if config.option.markexpr == "exact" else "same")


def pytest_collection_finish() -> None:
    """Nothing that is imported by now is garbage: looking through it took a sixth of the time of tests."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 20, 20)
    if torch := sys.modules.get("torch"):
        # Small tensors are slower with two, which wait for each other: longest where all cores are busy.
        torch.set_num_threads(1)
    if guards := sys.modules.get("torch._dynamo.guards"):
        vars(guards)["profile_guard_manager"] = untimed


def untimed(*_: object) -> float:
    """How long the guards of a graph take: Dynamo empties the processor's caches to find out, and nobody reads it."""
    return 0.0


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    return DataFile.from_parent(parent, path=file_path) if file_path.suffix == ".moai" else None


@dataclass(frozen=True, slots=True)
class Command:
    """One RUN line, taken apart."""

    text: str
    moaic: list[str]
    filecheck: list[str] | None
    fails: bool

    @staticmethod
    def parse(text: str) -> Command:
        run, bar, check = text.partition("|")
        words = shlex.split(run)
        fails = words[0] == "not"
        program, *arguments = words[fails:]
        checker = shlex.split(check)
        if program != "moaic" or (bar and checker[0] != "filecheck"):
            raise pytest.UsageError(f"a RUN line reads `[not] moaic ARGS [| filecheck [FLAGS]]`, not `{text}`")
        return Command(text, arguments, checker if bar else None, fails)


class DataFile(pytest.File):
    """A `.moai` file under tests/: one test per RUN line and piece."""

    def collect(self) -> Iterator[DataTest]:
        text = self.path.read_text(encoding="utf-8")
        runs = (line.removeprefix(RUN).strip() for line in text.splitlines() if line.startswith(RUN))
        commands = [Command.parse(run) for run in runs]
        for command in commands:
            for line, piece in pieces(text):
                name = f"{command.text}:{line + 1}" if line else command.text
                yield DataTest.from_parent(self, name=name, command=command, piece=piece)


def pieces(text: str) -> Iterator[tuple[int, str]]:
    """The parts of a file between cuts, each with its first line's index and padded so that line numbers hold."""
    before = 0
    for piece in text.split(CUT):
        yield before, "\n" * before + piece
        before += piece.count("\n") + 1


class DataTest(pytest.Item):
    """One command over one piece of a file."""

    def __init__(self, name: str, parent: DataFile, *, command: Command, piece: str) -> None:
        super().__init__(name, parent)
        self.command = command
        self.piece = piece

    def runtest(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / self.path.name
            path.write_text(self.piece, encoding="utf-8")
            code, printed = moaic([word.replace("%s", str(path)) for word in self.command.moaic])
            expected = MISTAKE if self.command.fails else 0
            if code != expected:
                pytest.fail(f"exit code {code}, not {expected}; it printed:\n{printed}", pytrace=False)
            if self.command.filecheck is not None:
                match([word.replace("%s", str(path)) for word in self.command.filecheck], printed)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, self.name


def moaic(arguments: list[str]) -> tuple[int, str]:
    """Exit code and printed text of one command line, run in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return code, out.getvalue() + err.getvalue()


def match(command: list[str], printed: str) -> None:
    """Fails with FileCheck's own words unless what was printed fits the CHECK lines of the file in `command`."""
    options = parse_argv_options(command)
    matcher = Matcher(options, FInput("printed", printed), Parser.from_opts(options))
    report = io.StringIO()
    matcher.stderr = report
    if matcher.run():
        pytest.fail(f"{report.getvalue()}\nprinted:\n{printed}", pytrace=False)


@pytest.fixture(scope="module", autouse=True)
def planners_stay() -> Iterator[None]:
    """Between two plans, until they are idle for long: to start them takes longer than to plan a small step."""

    def stay(pool: ProcessPool) -> None:
        pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessPool, "rest", stay)
        yield
