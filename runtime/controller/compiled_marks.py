"""Marks of programs whose functions are all in Inductor's cache on disk: such a program waits for no compiler.

A mark is an empty file inside that cache, and goes with it. It only saves time: where it is missing, functions are
compiled in the background without need; where it is wrong, the program waits for the compiler. Workers make it. That of
a program of several hosts is on this one, and stands for the caches of all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from moaic.runtime.host.cores import cores
from moaic.runtime.host.version import VERSION


def mark_of(text: str, devices: Sequence[str], hosts: Sequence[str]) -> Path:
    """The file for a program that workers on these devices of these hosts compile."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    facts = "\n".join((torch.__version__, VERSION, *devices, *hosts, str(cores()), text))
    return Path(cache_dir()) / "moaic" / hashlib.sha256(facts.encode()).hexdigest()[:24]
