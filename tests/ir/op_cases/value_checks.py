"""Cases of checks of values while a step runs."""

from __future__ import annotations

import torch

from tests.ir.op_cases.drawing import Case, Cases, Drawn, case

cases = Cases()


@cases("moai.checked")
def checked(d: Drawn, name: str) -> Case:
    """Of what belongs to the first dims of the value, and of something else."""
    shape = d.shape()
    said = shape[: d.number(0, len(shape))] if d.pick(True, True, False) else d.shape()
    good = torch.zeros(said, dtype=torch.int32) if d.pick(True, False) else torch.ones(said, dtype=torch.bool)
    return case(name, d.real(*shape), good, message="linalg.inv")
