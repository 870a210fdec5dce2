"""Peak memory and time of a step of a small Llama in one way: one JSON line per computing process.

Memory is the growth of resident memory from before a step to its peak, as the system counts it, printed beside the
prediction of the plan.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from moaic.ir.verify import load
from moaic.passes.estimate.memory import bytes_of, fused_functions, program_peak
from moaic.passes.estimate.per_rank import held
from moaic.passes.lowering.programs import lower
from moaic.runtime.controller import session
from moaic.runtime.host.cores import cores

INDUCTOR = "inductor"
"""The way of `torch.compile` as it is; every other way is a plan of moaic."""

TIMED = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("way", help=f"{INDUCTOR}, or a plan")
    parser.add_argument("--workers", type=int, default=1, help="of moaic; each way has all cores")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=8192)
    args: Any = parser.parse_args()
    measure = by_inductor if args.way == INDUCTOR else by_moai
    for number, row in enumerate(measure(args)):
        print(json.dumps({"worker": number, **row}), flush=True)


def build(args: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=args.vocabulary,
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=args.layers,
            num_attention_heads=4,
            max_position_embeddings=256,
            use_cache=False,
        )
    )


def tokens(args: Any) -> torch.Tensor:
    return torch.randint(1, args.vocabulary, (args.rows, 256), generator=torch.Generator().manual_seed(0))


def by_inductor(args: Any) -> list[dict[str, float | None]]:
    torch.set_num_threads(cores())
    model, ids = build(args), tokens(args)
    compiled: Any = torch.compile(model)

    def step() -> None:
        compiled(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()

    grown, seconds = taken(step, lambda: [os.getpid()])
    return [{"predicted": None, "measured": each, "seconds": seconds} for each in grown]


def by_moai(args: Any) -> list[dict[str, float | None]]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"MOAI_DUMP": folder, "MOAI_FLAVOR": str(args.workers), "MOAI_LOG": "warning"}
        os.environ["MOAI_PLAN"] = args.way
        model = build(args)
        model.to("moai")
        compiled: Any = torch.compile(model, backend="moai", options={"compile": "wait"})
        ids = tokens(args).to("moai")

        def step() -> None:
            compiled(input_ids=ids, labels=ids).loss.backward()
            model.zero_grad()
            torch.get_device_module("moai").synchronize()

        grown, seconds = taken(step, lambda: [worker.pid for worker in session.accelerator().stats().workers])
        (path,) = Path(folder).glob("*/plan.moai")
        expected = predicted(path.read_text(encoding="utf-8"), len(grown))
    pairs = zip(expected, grown, strict=True)
    return [{"predicted": nbytes, "measured": each, "seconds": seconds} for nbytes, each in pairs]


def predicted(plan: str, workers: int) -> list[int]:
    """Bytes that each worker's part of the joint program makes at most, beside what it is given."""
    program = lower(load(plan)).joint
    places = [program.mesh.coordinates(rank) for rank in range(workers)]
    given = [bytes_of(held(program.main.params, at), program.mesh) for at in places]
    return [program_peak(program, fused_functions(), at) - own for at, own in zip(places, given, strict=True)]


def taken(step: Callable[[], None], processes: Callable[[], Sequence[int]]) -> tuple[list[int], float]:
    """Bytes by which the resident memory of each process grew in a step at most, and seconds of a step."""
    for _ in range(2):
        step()
    pids = processes()
    before = [status(pid, "VmRSS") for pid in pids]
    for pid in pids:
        # Writing 5 makes the peak what it is now.
        Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")
    step()
    grown = [status(pid, "VmHWM") - base for pid, base in zip(pids, before, strict=True)]
    seconds: list[float] = []
    for _ in range(TIMED):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return grown, median(seconds)


def status(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
