"""Predicted beside measured seconds of a step, for every plan of a model on the workers of this machine.

Each plan trains the example's model in a process of its own (bench/train_once.py), round by round, so that what the
machine does meanwhile falls on all plans alike. All share one measurement of the machine, which the first run takes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from peers import ROOT, WARM_UP, write_data

MODELS: Mapping[str, tuple[str, ...]] = {
    "20m": ("--layers", "6"),
    "deep": ("--layers", "12", "--hidden", "256", "--intermediate", "1024", "--heads", "4"),
}
"""Options of train_once.py by name of the model."""

KINDS: Mapping[str, str] = {
    "dp": "dp={n}",
    "dp, optimizer": "dp={n},distribute_param=optimizer",
    "dp, use": "dp={n},distribute_param=use",
    "dp, 4 micro-batches": "dp={n},micro_batches=4",
    "dp, recompute": "dp={n},recompute=true",
    "tp": "tp={n}",
    "tp, 2 micro-batches": "tp={n},micro_batches=2",
    "cp": "cp={n}",
    "pp gpipe": "pp={n},micro_batches=4,schedule=gpipe",
    "pp 1f1b": "pp={n},micro_batches=8,schedule=1f1b",
    "pp interleaved": "pp={n},micro_batches=4,schedule=interleaved",
    "pp zero-bubble": "pp={n},micro_batches=8,schedule=zero-bubble",
}
"""MOAI_PLAN by kind of plan, for `n` workers."""

MIXED: Mapping[str, str] = {
    "dp x tp": "dp=2,tp=2",
    "dp x pp": "dp=2,pp=2,micro_batches=4,schedule=1f1b",
    "tp x pp": "tp=2,pp=2,micro_batches=4,schedule=1f1b",
    "dp x cp": "dp=2,cp=2",
}
"""More kinds, for four workers."""

WHOLE = "dp=1,tp=1,cp=1,ep=1,pp=1,micro_batches=1,recompute=false,distribute_param=false"
"""What a plan has where its pattern says nothing."""


@dataclass(slots=True)
class Row:
    """One plan: seconds of a step as predicted, and as they were measured."""

    plan: str
    predicted: float
    seconds: list[float] = field(default_factory=list[float])

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / median(self.seconds)


def plan_of(pattern: str, workers: int) -> str:
    """A plan with nothing left open."""
    fixed: dict[str, str] = {}
    for part in f"{WHOLE},{pattern.format(n=workers)}".split(","):
        name, _, value = part.partition("=")
        fixed[name] = value
    return ",".join(f"{name}={value}" for name, value in fixed.items())


def run(plan: str, model: Sequence[str], workers: int, folder: Path, steps: int) -> Row:
    """Trains under a plan. Raises RuntimeError with the process's words if it fails."""
    dumped = folder / "dump" / plan
    command = [sys.executable, str(ROOT / "bench" / "train_once.py"), "moai", str(folder / "data.pt")]
    command += ["--steps", str(steps + WARM_UP), *model]
    variables = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "XDG_CACHE_HOME": str(folder),
        "MOAI_LOG": "warning",
        "MOAI_FLAVOR": str(workers),
        "MOAI_COMPILE": "wait",
        "MOAI_PLAN": plan,
        "MOAI_DUMP": str(dumped),
    }
    done = subprocess.run(command, env=variables, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(f"{plan}:\n{done.stderr[-3000:]}")
    measured = [json.loads(line)["seconds"] for line in done.stdout.splitlines()][WARM_UP:]
    return Row(plan, _predicted(dumped), measured)


def _predicted(folder: Path) -> float:
    """Seconds of the selected plan, which a dump gives by part in milliseconds."""
    (table,) = folder.glob("*/candidates.txt")
    rows = table.read_text(encoding="utf-8").splitlines()
    return sum(float(line.split()[1]) for line in rows[1 : rows.index("")]) / 1000


def compare(model: str, workers: int, rounds: int, steps: int, names: Sequence[str] = ()) -> dict[str, Row]:
    """By kind of plan, what is predicted and measured."""
    kinds = {**KINDS, **(MIXED if workers == 4 else {})}
    rows: dict[str, Row] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_data(folder)
        for _ in range(rounds):
            for kind in names or kinds:
                row = run(plan_of(kinds[kind], workers), MODELS[model], workers, folder, steps)
                rows.setdefault(kind, Row(row.plan, row.predicted)).seconds += row.seconds
                print(f"{kind:24}{row.predicted:8.3f}{median(row.seconds):8.3f}", file=sys.stderr, flush=True)
    return rows


def table(rows: Mapping[str, Row]) -> str:
    """A line per plan, and the median of the absolute errors."""
    lines = [f"{'':24}{'predicted':>10}{'measured':>10}{'ratio':>8}"]
    for kind, row in rows.items():
        lines.append(f"{kind:24}{row.predicted:>10.3f}{median(row.seconds):>10.3f}{row.ratio:>8.2f}")
    errors = [abs(row.ratio - 1) for row in rows.values()]
    lines.append(f"median error {median(errors):.1%}, largest {max(errors):.1%}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="20m", choices=tuple(MODELS))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kinds", help="names of kinds of plans, separated by semicolons")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    args: Any = parser.parse_args()
    names = args.kinds.split(";") if args.kinds else ()
    print(table(compare(args.model, args.workers, args.rounds, args.steps, names)))


if __name__ == "__main__":
    main()
