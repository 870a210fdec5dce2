"""Runs `memory_once.py` in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import cast

HERE = Path(__file__).parent

Rows = list[dict[str, float]]

RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
"""What is freed goes back to the system at once, so that what is resident is what is in use."""


def memory_of(way: str, *options: str, returned: bool = True) -> Rows:
    """A row per process that computes: bytes predicted and measured, and seconds of a step.

    Without `returned` memory is left to the allocator, as in programs that nobody measures.
    """
    variables = {**os.environ, **(RETURNED if returned else {})}
    command = [sys.executable, str(HERE / "memory_once.py"), way, *options]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    return [cast("dict[str, float]", json.loads(line)) for line in done.stdout.splitlines()]
