"""Without a measured gain, neither patterns nor kernels are imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moaic.runtime.kernels.gains import winning_in_functions

ROOT = Path(__file__).parent.parent.parent
PACKAGE = "moaic.runtime.kernels"

LIGHT = {PACKAGE, *(f"{PACKAGE}.{name}" for name in ("dispatch", "gains", "triton_launch", "online_softmax", "tiles"))}
"""Tables and plain PyTorch."""

HEAD = """
from moaic.ir.verify import load
from moaic.runtime.codegen import compile
from moaic.runtime.worker import serve
import torch
function = load("func @f(%x: f32[4]) -> (f32[4]) { %y = aten.neg %x : f32[4] return %y }").main
"""

ON_A_CPU = """
(y,) = compile.compile_function(function, compiled=True)([torch.ones(4)])
assert y.tolist() == [-1.0] * 4
"""

ON_A_GPU = """
compile.target_of = lambda device: "sm_90"
assert compile._with_kernels(function, torch.device("cuda")) is function
"""


def imported_by(script: str) -> set[str]:
    """Modules of the kernels in a process that has run the script as a worker would."""
    report = "import json, sys; print(json.dumps([*sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"{HEAD}{script}{report}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {name for name in json.loads(done.stdout.splitlines()[-1]) if name.startswith(PACKAGE)}


def test_a_worker_of_a_cpu_imports_no_kernel() -> None:
    assert imported_by(ON_A_CPU) == LIGHT


def test_a_gpu_without_measured_gains_imports_no_kernel() -> None:
    if winning_in_functions("sm_90"):
        pytest.skip("some kernel has a measured gain there")
    assert imported_by(ON_A_GPU) == LIGHT
