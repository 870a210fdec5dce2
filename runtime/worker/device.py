"""The device of a worker, by its name."""

from __future__ import annotations

from moaic.runtime.comm.device_backend import DeviceBackend, backend_of
from moaic.runtime.emulation.backend import EmulatedGpuBackend
from moaic.runtime.host.gpu_specs import target_of
from moaic.runtime.host.worker_kinds import emulated_target


def backend_for(device: str) -> DeviceBackend:
    """The device called `cpu`, `cuda:N`, or as the GPU that it emulates, such as `triton:sm_90`."""
    target = emulated_target(device)
    return backend_of(device) if target is None else EmulatedGpuBackend(target_of(target))
