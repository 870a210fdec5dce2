"""Specifications of the GPUs that kernels are compiled for, whether this host has one or not.

Figures are from the vendors' data sheets: NVIDIA H100 SXM and A100 80GB SXM, AMD Instinct MI300X and one of the two
dies of an MI250X. Data sheets give the bandwidth of links for both directions together: 900 and 600 GB/s of NVLink,
seven times 128 GB/s of Infinity Fabric; a die of an MI250X has seven links of 100 GB/s to other dies. For AMD, a
multiprocessor is a compute unit and a warp a wavefront.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from moaic.ir.errors import Diagnostic
from moaic.ir.types import FLOAT8
from moaic.text.units import KIB


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of GPU. Rates are the vendor's peaks: bytes and floating-point operations per second."""

    name: str
    device: str
    backend: str
    """Triton's backend: `cuda` or `hip`."""
    arch: int | str
    warp: int
    """Threads of a warp."""
    multiprocessors: int
    registers: int
    """32-bit registers of a multiprocessor."""
    threads: int
    """Most threads of a multiprocessor."""
    shared: int
    """Most bytes of shared memory of a block."""
    memory: int
    """Bytes of memory of the GPU."""
    bandwidth: float
    vector: float
    """Rate of float32 arithmetic outside matrix units."""
    matmul: Mapping[str, float]
    """Rate of matrix products by element type of the IR; `f8` stands for all eight-bit floats."""
    links: float
    """Rate of all links to GPUs of the same host together, in one direction."""
    direct: bool
    """Whether each link connects two GPUs; else all links go to a switch."""
    together: int = 8
    """GPUs per host on this interconnect."""

    @property
    def suffix(self) -> str:
        """Suffix of a file with a compiled kernel."""
        return "cubin" if self.backend == "cuda" else "hsaco"

    @property
    def has_float8(self) -> bool:
        return "f8" in self.matmul

    def seconds(self, flops: float, nbytes: float, heavy: str | None = None) -> float:
        """The roofline: the longer of arithmetic and memory traffic; `heavy` is the element type of a product."""
        kind = "f8" if heavy in FLOAT8 else heavy
        rate = self.vector if kind is None else self.matmul.get(kind, self.matmul["f32"])
        return max(flops / rate, nbytes / self.bandwidth)


LAUNCH_SECONDS: Final = 4e-6
"""Time to launch a kernel that no other kernel hides. Assumed, not measured."""

_GB: Final = 10**9

TARGETS: Final[Mapping[str, Target]] = {
    target.name: target
    for target in (
        Target(
            "sm_90",
            "NVIDIA H100 SXM",
            "cuda",
            90,
            warp=32,
            multiprocessors=132,
            registers=64 * KIB,
            threads=2048,
            shared=227 * KIB,
            memory=80 * _GB,
            bandwidth=3.35e12,
            vector=67e12,
            matmul={"f64": 67e12, "f32": 67e12, "f16": 989e12, "bf16": 989e12, "f8": 1979e12},
            links=450e9,
            direct=False,
        ),
        Target(
            "sm_80",
            "NVIDIA A100 80GB SXM",
            "cuda",
            80,
            warp=32,
            multiprocessors=108,
            registers=64 * KIB,
            threads=2048,
            shared=163 * KIB,
            memory=80 * _GB,
            bandwidth=2.039e12,
            vector=19.5e12,
            matmul={"f64": 19.5e12, "f32": 19.5e12, "f16": 312e12, "bf16": 312e12},
            links=300e9,
            direct=False,
        ),
        Target(
            "gfx942",
            "AMD Instinct MI300X",
            "hip",
            "gfx942",
            warp=64,
            multiprocessors=304,
            registers=128 * KIB,
            threads=2048,
            shared=64 * KIB,
            memory=192 * _GB,
            bandwidth=5.3e12,
            vector=163.4e12,
            matmul={"f64": 163.4e12, "f32": 163.4e12, "f16": 1307.4e12, "bf16": 1307.4e12, "f8": 2614.9e12},
            links=7 * 64e9,
            direct=True,
        ),
        Target(
            "gfx90a",
            "AMD Instinct MI250X, one die",
            "hip",
            "gfx90a",
            warp=64,
            multiprocessors=110,
            registers=128 * KIB,
            threads=2048,
            shared=64 * KIB,
            memory=64 * _GB,
            bandwidth=1.6e12,
            vector=23.95e12,
            matmul={"f64": 47.85e12, "f32": 47.85e12, "f16": 191.5e12, "bf16": 191.5e12},
            links=7 * 50e9,
            direct=True,
        ),
    )
}
"""The specifications, by the compiler's name of the architecture."""


def target_of(name: str) -> Target:
    """The specification of an architecture; raises Diagnostic if there is none."""
    if name not in TARGETS:
        known = ", ".join(f"{target.name} ({target.device})" for target in TARGETS.values())
        raise Diagnostic(f"there is no target `{name}`", hint=f"choose one of {known}")
    return TARGETS[name]
