"""A part of `bench/gpu.py`: the tests of moaic's kernels, on the GPU instead of in Triton's interpreter.

They are those of `tests/kernels/interpreted` and `bench/parked_kernels`: drawn shapes, types and strides beside
float64. Tests of the interpreter itself stay there, and so do those that damage a kernel on purpose, as a stray write
does no harm in it.
"""

from __future__ import annotations

import contextlib
import sys

import pytest
import torch
from gpu_findings import Check, LeftOut, Task, parser, task_of

from tests.kernels.test_interpreter import CHECKS, FOLDER, PARKED

DETAIL = 400
"""Characters of a failure that are kept; the rest is in the part's log."""


class Reporter:
    """Writes down what becomes of each test, and begins none after the deadline."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self._task.seconds_left < 0:
            pytest.skip("no time was left")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("::")[2]
        if report.failed:
            self._task.say(Check(name, passed=False, detail=report.longreprtext.strip()[-DETAIL:]))
        elif report.skipped:
            self._task.say(LeftOut(name, "no time was left"))
        elif report.when == "call":
            self._task.say(Check(name, passed=True))


def main() -> int:
    task = task_of(parser(__doc__).parse_args())
    # Every tensor that the tests make.
    torch.set_default_device(task.device)
    profile = "glance" if task.here else "few"
    # Warnings are errors in the tests here; another machine may have warnings of its own.
    options = [*CHECKS, f"--hypothesis-profile={profile}", "-W", "ignore", "-k", "not check_spoiled"]
    # Their own folder has all that they need; those above it want packages of other tests.
    options += [f"--confcutdir={FOLDER}"]
    options += [] if task.here else [f"--ignore={FOLDER}/check_emulation.py"]
    with contextlib.redirect_stdout(sys.stderr), task.beside():
        code = pytest.main([FOLDER, PARKED, *options], plugins=[Reporter(task)])
    # Failed tests are findings; anything else that went wrong is an end of this part.
    return 0 if code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) else int(code)


if __name__ == "__main__":
    sys.exit(main())
