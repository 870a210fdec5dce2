"""A part of `bench/gpu.py`: small models trained on several workers of one GPU, compared with PyTorch on the CPU.

First every plan op by op, then some of them compiled, then one in eight-bit floats where the GPU has them
and torchao is installed. The accelerator is that of MOAI_FLAVOR.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch
from gpu_findings import Check, Finding, LeftOut, Task, parser, task_of

from moaic.runtime.controller import session
from moaic.runtime.host.gpus import usable
from tests.exact.float8 import beside_torchao, is_computed_here
from tests.exact.models import EXAMPLES
from tests.exact.training import (
    PLANS,
    Reference,
    Trainee,
    check_gradients,
    check_run,
    compiled,
    gradients,
)

MODEL = EXAMPLES["llama"]

COMPILED = ("dp2", "tp2", "pp2", "use", "dp2_mb2")

HERE, COMPILED_HERE = ("dp2", "tp2", "pp2"), ("dp2",)

EIGHT = "float8"


class Proofs:
    """Runs of one model under plan after plan, each beside the same run in plain PyTorch."""

    def __init__(self) -> None:
        self.reference = Reference(MODEL)
        self.trainee = Trainee(MODEL)

    def op_by_op(self, plan: str) -> None:
        """Gradients, and a training with AdamW. Raises AssertionError."""
        self.trainee.use(plan)
        check_gradients(self.trainee.gradients(), self.reference.gradients)
        check_run(self.trainee.run("adamw"), self.reference.run("adamw"))

    def compiled(self, plan: str) -> None:
        """Gradients. Raises AssertionError."""
        torch.compiler.reset()
        model = MODEL.model().to("moai")
        call = compiled(model, PLANS[plan], compile="wait")
        check_gradients(gradients(model, call, MODEL.batch()), self.reference.gradients)


def cases(proofs: Proofs, *, here: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    plain = HERE if here else [name for name in PLANS if name != "ep2"]
    for plan in plain:
        yield f"{plan}, op by op", lambda plan=plan: proofs.op_by_op(plan)
    for plan in COMPILED_HERE if here else COMPILED:
        yield f"{plan}, compiled", lambda plan=plan: proofs.compiled(plan)
    if find_spec("torchao") and is_computed_here(EIGHT) and all(gpu.has_float8 for gpu in usable(os.environ)):
        yield f"dp2, {EIGHT}, compiled", lambda: beside_torchao(EIGHT, "dp2")


def verdict(name: str, prove: Callable[[], None]) -> Check:
    """Whatever goes wrong is the verdict on this plan, and the others are still to be judged."""
    try:
        prove()
    except Exception as error:
        return Check(name, passed=False, detail=f"{type(error).__name__}: {str(error).strip()[:400]}")
    return Check(name, passed=True)


def prove_all(task: Task, proofs: Proofs) -> None:
    """One after the other, until the next might not end in time."""
    longest = 0.0
    for name, prove in cases(proofs, here=task.here):
        if task.seconds_left < longest:
            task.say(LeftOut(name, f"{task.seconds_left:.0f} s were left, and one has taken {longest:.0f} s"))
            continue
        start = time.monotonic()
        task.say(verdict(name, prove))
        longest = max(longest, time.monotonic() - start)


def workers_on_the_gpu() -> Finding:
    """Whether the allocators of GPUs have given memory to workers."""
    peaks = [worker.peak for worker in session.accelerator().stats().workers]
    said = ", ".join(f"{peak / 1e6:.0f} MB" for peak in peaks)
    return Check(
        "workers are on the GPU", passed=bool(peaks) and all(peaks), detail=f"the most that each has held: {said}"
    )


def main() -> None:
    task = task_of(parser(__doc__).parse_args())
    with task.beside():
        prove_all(task, Proofs())
    task.say(LeftOut("workers are on the GPU", "there is none") if task.here else workers_on_the_gpu())


if __name__ == "__main__":
    main()
