"""The kind of workers that the user asks for: MOAI_WORKERS, the device of each, and MOAI_KERNELS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from moaic.ir.errors import Diagnostic
from moaic.runtime.host.gpu_specs import TARGETS, target_of
from moaic.runtime.host.gpus import CPU

WORKERS_VARIABLE: Final = "MOAI_WORKERS"

KERNELS_VARIABLE: Final = "MOAI_KERNELS"

TRITON: Final = "triton"
"""Workers that run the kernels of a GPU that is not here, interpreted: slow, for proofs."""

USUAL_TARGET: Final = "sm_90"

INTERPRETED: Final = "TRITON_INTERPRET"
"""The variable with which Triton interprets kernels; it reads it when it is imported."""


def asked_device(environment: Mapping[str, str]) -> str | None:
    """The device of workers on cores, `cpu` or `triton:sm_90`; None if the user leaves it open. Raises Diagnostic."""
    text = environment.get(WORKERS_VARIABLE)
    if text is None:
        return None
    kind, colon, target = text.partition(":")
    if text == CPU or (kind == TRITON and (target or not colon)):
        return CPU if text == CPU else f"{TRITON}:{target_of(target or USUAL_TARGET).name}"
    others = ", ".join(f"{TRITON}:{name}" for name in TARGETS)
    raise Diagnostic(
        f"{WORKERS_VARIABLE} must be the kind of workers, not `{text}`", hint=f"set {CPU}, {TRITON} or one of {others}"
    )


def emulated_target(device: str) -> str | None:
    """The GPU that a device of workers emulates; None for one that is what it says."""
    kind, _, target = device.partition(":")
    return target if kind == TRITON else None


def takes_all_kernels(environment: Mapping[str, str]) -> bool:
    """Whether moaic's own kernels run wherever they can, measured or not. Raises Diagnostic."""
    text = environment.get(KERNELS_VARIABLE, "measured")
    if text not in ("all", "measured"):
        raise Diagnostic(
            f"{KERNELS_VARIABLE} must say which kernels of moaic run on GPUs, not `{text}`",
            hint="set measured, for those that were measured to win, or all",
        )
    return text == "all"
