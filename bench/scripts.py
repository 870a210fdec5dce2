"""Shapes of training scripts, each on the host in plain PyTorch and on the accelerator, in turns.

The accelerator's run differs by the one line (`enable_advanced_parallelization`) and the word `cuda`. Each run is a
process of its own with empty caches. A row tells the largest difference of a loss from the host's, and for both the
seconds from start to the first loss, the steps per second of the second half, and the seconds of the whole run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
HOST, ACCELERATOR = "cpu", "cuda"
HEAD = ("script", "steps", "largest difference", "first loss", "steps/s", "whole run")


@dataclass(frozen=True, slots=True)
class Run:
    """The losses of one run, and the seconds from its start at which they came."""

    losses: Sequence[float]
    seconds: Sequence[float]

    @property
    def first(self) -> float:
        return self.seconds[0]

    @property
    def whole(self) -> float:
        return self.seconds[-1]

    @property
    def rate(self) -> float:
        """Steps per second of the second half."""
        half = len(self.seconds) // 2
        return (len(self.seconds) - 1 - half) / (self.seconds[-1] - self.seconds[half])


def trained(name: str, device: str) -> None:
    """Runs a script in this process; prints each loss as it comes."""
    import torch

    sys.path.insert(0, str(ROOT / "bench"))
    if device == ACCELERATOR:
        options: Any = torch.get_device_module("moai").option
        options.enable_advanced_parallelization()
    from shapes import SCRIPTS

    torch.manual_seed(0)
    for loss in SCRIPTS[name](device):
        print(json.dumps([loss, time.time()]), flush=True)


def launched(name: str, device: str, caches: Path) -> Run:
    """Runs a script in a process of its own. Raises RuntimeError with its last words if it fails."""
    own = {"TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), "XDG_CACHE_HOME": str(caches), "MOAI_LOG": "error"}
    command = [sys.executable, __file__, "--run", name, "--device", device]
    start = time.time()
    done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-2000:])
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    return Run([row[0] for row in rows], [row[1] - start for row in rows])


def row(name: str, caches: Path) -> str:
    try:
        host, ours = launched(name, HOST, caches), launched(name, ACCELERATOR, caches)
    except RuntimeError as error:
        return f"| {name} | failed: {str(error).splitlines()[-1]} |"
    pairs = list(zip(host.losses, ours.losses, strict=True))
    off = max(abs(a - b) / max(1.0, abs(a)) for a, b in pairs)
    cells = [name, str(len(pairs)), f"{off:.1e}", f"{host.first:.1f} / {ours.first:.1f} s"]
    cells += [f"{host.rate:.1f} / {ours.rate:.1f}", f"{host.whole:.1f} / {ours.whole:.1f} s"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="scripts whose names contain this")
    parser.add_argument("--run", help="run one script in this process")
    parser.add_argument("--device", default=HOST, choices=(HOST, ACCELERATOR))
    args: Any = parser.parse_args()
    if args.run:
        trained(args.run, args.device)
        return
    sys.path.insert(0, str(ROOT / "bench"))
    from shapes import SCRIPTS

    print(f"| {' | '.join(HEAD)} |\n|{' --- |' * len(HEAD)}", flush=True)
    for name in SCRIPTS:
        if args.only in name:
            with tempfile.TemporaryDirectory() as folder:
                print(row(name, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
