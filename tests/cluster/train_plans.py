"""A program for tests: trains a small model under one plan after the other, each compared with plain PyTorch.

For each plan it prints a digest of all gradients, losses and parameters: equal digests are equal bits.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping

from torch import Tensor

from moaic.compile import planning
from moaic.runtime.controller.session import accelerator
from tests.exact import training
from tests.exact.models import EXAMPLES, MIXTURE
from tests.exact.training import PLAIN, Plan, Reference, Run, Trainee, check_gradients, check_run
from tests.passes.steps import machine

FOR_MORE: Mapping[str, Plan] = {
    "use3": {**PLAIN, "dp": 3, "distribute_param": "use"},
    "optimizer3": {**PLAIN, "dp": 3, "distribute_param": "optimizer", "micro_batches": 2},
    "dp4": {**PLAIN, "dp": 4},
    "use4": {**PLAIN, "dp": 4, "distribute_param": "use"},
    "dp2_tp2": {**PLAIN, "dp": 2, "tp": 2},
    "dp2_cp2": {**PLAIN, "dp": 2, "cp": 2},
    "tp4": {**PLAIN, "tp": 4},
    "cp4": {**PLAIN, "cp": 4},
    **{
        f"pp2_dp2_{schedule}": {**PLAIN, "pp": 2, "dp": 2, "micro_batches": 2, "schedule": schedule}
        for schedule in ("gpipe", "1f1b", "zero-bubble")
    },
}

STEPS = 6
"""Of a training: all bits are compared, and tests/exact trains longer."""


def main(family: str, *names: str) -> None:
    example = {**EXAMPLES, "mixtral": MIXTURE}[family]
    training.PLANS = {**training.PLANS, **FOR_MORE}
    training.STEPS = STEPS
    # Layouts are selected by the speeds of links, which are others over hosts: another plan has other last bits.
    workers = accelerator().flavor
    sys.stdout.write(f"carrier {accelerator().carrier}\n")
    planning.this_machine = lambda: machine(workers)
    reference, trainee = Reference(example), Trainee(example)
    for name in names:
        trainee.use(name)
        found, run = trainee.gradients(), trainee.run("adamw")
        check_gradients(found, reference.gradients)
        check_run(run, reference.run("adamw"))
        sys.stdout.write(f"digest {name} {digest(found, run)}\n")


def digest(gradients: Mapping[str, Tensor], run: Run) -> str:
    hashed = hashlib.sha256(repr(run.losses).encode())
    for tensors in (gradients, run.parameters):
        for name in sorted(tensors):
            hashed.update(tensors[name].cpu().contiguous().numpy().tobytes())
    return hashed.hexdigest()[:16]


if __name__ == "__main__":
    main(*sys.argv[1:])
