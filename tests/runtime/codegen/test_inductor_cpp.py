"""Libraries of kernels appear in the cache when they are complete."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

BUILD = """
import sys
from moaic.runtime.codegen import inductor_cpp
from torch._inductor import cpp_builder
cpp_builder.run_compile_cmd(sys.argv[1], cwd="/")
"""


def build(compiler: Path, target: Path) -> int:
    """Run a compiler as Inductor does, in a session of its own; returns the exit code."""
    command = [sys.executable, "-c", BUILD, f"sh {compiler} -shared -o {target} kernel.cpp"]
    return subprocess.run(command, start_new_session=True, check=False).returncode


@pytest.mark.parametrize("ending", ["kill -9 0", "exit 1"])
def test_a_compiler_that_does_not_end_leaves_no_library(tmp_path: Path, ending: str) -> None:
    compiler, target = tmp_path / "compiler", tmp_path / "kernel.so"
    compiler.write_text(f'printf half > "$3"\n{ending}\n', encoding="utf-8")
    assert build(compiler, target) in (-signal.SIGKILL, 1)
    assert not target.exists()


def test_a_library_has_its_name_in_the_end(tmp_path: Path) -> None:
    compiler, target = tmp_path / "compiler", tmp_path / "kernel.so"
    compiler.write_text('printf whole > "$3"\n', encoding="utf-8")
    assert build(compiler, target) == 0
    assert target.read_text(encoding="utf-8") == "whole"
    assert {*tmp_path.iterdir()} == {compiler, target}
