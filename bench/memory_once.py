"""Peak memory of each worker of a pipeline in one step, measured and predicted: a JSON line per worker.

The step is one of the example's Llama with large activations. What is measured is the growth of resident memory from
before the step to its peak, as the system counts it.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from train_llama2 import build

from moaic.ir.verify import load
from moaic.passes.memory import bytes_of, fused_functions, program_peak
from moaic.passes.program import lower
from moaic.passes.rank import held
from moaic.passes.schedule import schedule_of
from moaic.runtime import session

SIZE = argparse.Namespace(
    seed=0, hidden=256, layers=6, heads=4, intermediate=1024, seq=256, dtype="float32", device="moai"
)
ROWS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("schedule")
    parser.add_argument("--parts", type=int, default=8)
    args: Any = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"MOAI_DUMP": folder, "MOAI_FLAVOR": "2", "MOAI_LOG": "warning"}
        os.environ["MOAI_PLAN"] = f"pp=2,micro_batches={args.parts},schedule={args.schedule}"
        measured = growth_in_a_step()
        (path,) = Path(folder).glob("*/plan.moai")
        plan = load(path.read_text(encoding="utf-8"))
    # Nobody reads the logits, so no step makes them.
    logits = [i for i, value in enumerate(plan.main.results) if value.type.shape[-1:] == (8192,)]
    outputs = [i for i in logits if plan.main.result_role(i).kind == "output"]
    program = lower(plan, outputs).joint
    schedule = schedule_of(args.schedule, 2, args.parts)
    for worker, grown in enumerate(measured):
        at = {"pp": worker}
        inputs = bytes_of(held(program.main.params, at), program.mesh)
        expected = program_peak(program, fused_functions(), at) - inputs
        row = {"worker": worker, "live": schedule.live(worker), "predicted": expected, "measured": grown}
        print(json.dumps(row), flush=True)


def growth_in_a_step() -> list[int]:
    """Bytes by which each worker's resident memory grew at most."""
    model: Any = build(SIZE)
    model.to("moai")
    compiled: Any = torch.compile(model, backend="moai")
    ids = torch.randint(1, 8192, (ROWS, SIZE.seq), generator=torch.Generator().manual_seed(0)).to("moai")

    def step() -> None:
        compiled(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()
        torch.get_device_module("moai").synchronize()

    for _ in range(2):
        step()
    workers = [worker.pid for worker in session.accelerator().stats().workers]
    before = [status(pid, "VmRSS") for pid in workers]
    for pid in workers:
        # Writing 5 makes the peak what it is now.
        Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")
    step()
    return [status(pid, "VmHWM") - base for pid, base in zip(workers, before, strict=True)]


def status(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
