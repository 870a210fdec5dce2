"""Runs a tutorial script in plain PyTorch on the CPU, without moaic: `plain.py SCRIPT FLAGS`.

A machine without GPUs has no `.cuda()`; here it leaves tensors and models where they are.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


def here(self: Any) -> Any:
    return self


def nothing() -> None:
    return None


def any_peak(dtype: torch.dtype) -> float:
    """MFU means nothing here."""
    return 1e12


def main() -> None:
    _, script, *flags = sys.argv
    sys.argv = [script, *flags]
    sys.path.insert(0, str(Path(script).parent))
    pytorch: Any = torch
    pytorch.Tensor.cuda = here
    pytorch.nn.Module.cuda = here
    pytorch.cuda.synchronize = nothing
    option = SimpleNamespace(enable_advanced_parallelization=nothing)
    pytorch.moai = SimpleNamespace(option=option, peak_flops=any_peak)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
