"""Ops on lists of tensors, in a new process: PyTorch lists only ops that were accessed before."""

from __future__ import annotations

import subprocess
import sys

FIND = "from moaic.capture.foreach import per_tensor; print(*(op for op, _ in per_tensor()))"


def test_all_are_taken_apart() -> None:
    found = subprocess.run([sys.executable, "-c", FIND], capture_output=True, text=True, check=True).stdout.split()
    assert {
        "aten._foreach_reciprocal.default",
        "aten._foreach_addcdiv.ScalarList",
        "aten._foreach_lerp.Scalar",
        "aten._foreach_norm.Scalar",
    } <= set(found)
    assert "aten._foreach_addcdiv.Tensor" not in found
