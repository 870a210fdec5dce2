"""Enumeration of GPUs without starting them, and the resulting flavors; on hosts without GPUs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moaic.runtime.comm.device_backend import CpuBackend
from moaic.runtime.host import flavors, gpus
from moaic.runtime.host.flavors import Host, asked_for, ladder
from moaic.runtime.host.gpus import Gpu, amd, narrowed, nvidia, usable
from moaic.runtime.worker.oom import shortage_of
from moaic.text.units import GIB

LIBRARY = """
#include <string.h>
typedef struct { unsigned long long total, free, used; } memory;
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)(1ul + index); return index > 1; }
int nvmlDeviceGetName(void *device, char *name, unsigned length) {
  strncpy(name, device == (void *)1 ? "NVIDIA H100" : "NVIDIA H200", length);
  return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) { *major = 9; *minor = 0; return 0; }
int nvmlDeviceGetMemoryInfo(void *device, memory *found) {
  found->total = (unsigned long long)device * (80ull << 30);
  return 0;
}
"""
"""What NVIDIA's management library has, as far as it is asked: its own header says these types."""


def test_nvidia_is_asked_through_its_library(tmp_path: Path) -> None:
    source, library = tmp_path / "nvml.c", tmp_path / "nvml.so"
    source.write_text(LIBRARY, encoding="ascii")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    assert nvidia(str(library)) == [Gpu("NVIDIA H100", 80 * GIB, "sm_90"), Gpu("NVIDIA H200", 160 * GIB, "sm_90")]
    assert nvidia("libthere-is-none.so.1") == []


def test_amd_is_read_in_the_file_system(tmp_path: Path) -> None:
    facts = {"0": "cpu_cores_count 64\nsimd_count 0\n", "1": "simd_count 1216\ngfx_target_version 90402\n"}
    for node, text in facts.items():
        bank = tmp_path / node / "mem_banks" / "0"
        bank.mkdir(parents=True)
        (tmp_path / node / "properties").write_text(text, encoding="ascii")
        (bank / "properties").write_text(f"heap_type 1\nsize_in_bytes {192 * GIB}\n", encoding="ascii")
    assert amd(tmp_path) == [Gpu("AMD gfx942", 192 * GIB, "gfx942")]
    assert amd(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("arch", "has"),
    [("sm_80", False), ("sm_89", True), ("sm_120", True), ("gfx90a", False), ("gfx942", True), ("gfx950", True)],
)
def test_some_multiply_eight_bit_floats(arch: str, has: bool) -> None:
    assert Gpu("one", GIB, arch).has_float8 is has


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four GPUs, for all that this PyTorch is told."""
    monkeypatch.setattr(gpus, "built_for", lambda: "cuda")
    monkeypatch.setattr(gpus, "nvidia", lambda: [Gpu(f"NVIDIA {n}", (80 + n) * GIB, "sm_90") for n in range(4)])


@pytest.mark.usefixtures("four")
def test_people_choose_among_gpus_as_ever() -> None:
    def named(text: str) -> list[str]:
        return [gpu.name for gpu in usable({"CUDA_VISIBLE_DEVICES": text})]

    assert len(usable({})) == 4
    assert named("2,0") == ["NVIDIA 2", "NVIDIA 0"]
    assert named("1,9,0") == ["NVIDIA 1"]
    assert len(named("GPU-a1b2, GPU-c3d4")) == 2
    assert named("") == named("-1") == []
    assert narrowed(1, {}) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert narrowed(1, {"CUDA_VISIBLE_DEVICES": "2,GPU-c3d4"}) == {"CUDA_VISIBLE_DEVICES": "GPU-c3d4"}


def test_gpus_that_this_pytorch_cannot_use_are_none() -> None:
    expected = "hip" if torch.version.hip else "cuda" if torch.version.cuda else ""
    assert gpus.built_for() == expected
    assert expected or usable({}) == []


@pytest.mark.usefixtures("four")
def test_a_host_with_gpus_has_a_worker_for_each(tmp_path: Path) -> None:
    here = flavors.this_host({})
    assert here == Host(4, 320 * GIB, gpus=4)
    assert [flavor.name for flavor in ladder(here)] == ["Small.80GB", "Medium.160GB", "Large.320GB"]
    whole = here.flavor(here.workers)
    assert whole.devices == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    assert whole.per_worker == 80 * GIB
    environment = {"HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": "3"}
    several = asked_for("2", environment)
    assert several.devices == ("cuda:0", "cuda:0")
    assert several.memory == 83 * GIB
    assert asked_for("2", {**environment, "CUDA_VISIBLE_DEVICES": ""}).devices == ("cpu", "cpu")


LOADED = """
import sys, threading
import torch

def started(*_):
    raise SystemExit("a GPU was started")

# As where there is a GPU: whatever starts one goes through here.
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda._lazy_init = started

from moaic.runtime.worker import serve
from moaic.runtime.worker.fork_server import _compiler, _nothing

assert _compiler(["cuda:0"]) is _nothing
assert "torch._inductor.compile_fx" in sys.modules
assert threading.active_count() == 1
print("ready to fork")
"""


def test_the_fork_server_of_gpu_workers_starts_no_gpu() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=False)
    assert done.stdout == "ready to fork\n", done.stderr


def test_a_gpu_that_is_full_says_what_it_was_asked_for() -> None:
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79 GiB"
    )
    short = shortage_of(error, CpuBackend(), 0)
    assert short is not None
    assert short.asked == 5 * GIB // 2
