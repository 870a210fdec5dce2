"""`torch.moai`: the functions that PyTorch expects of a device's module, and reports about the accelerator.

`import torch` imports it in every program, so importing it starts nothing.
"""

from __future__ import annotations

import importlib
import inspect
import os
import time
from collections import OrderedDict
from typing import Any, Final, Self

import torch

from moaic.device.identity import IN_USE, NAME, is_moai
from moaic.device.lifecycle import LIFECYCLE
from moaic.ir.errors import Diagnostic


def _lazy_init() -> None:
    """Called by torch before it makes the first tensor of the device."""
    LIFECYCLE.ensure_started()


def _accelerator() -> Any:
    _lazy_init()
    from moaic.runtime.controller import session

    return session.accelerator()


def _check(device: Any) -> int:
    """The index of a device argument; there is one accelerator, however many workers it has."""
    if device is None or device == NAME:
        return 0  # checked first, as the device may not be registered yet
    index = device if isinstance(device, int) else torch.device(device).index
    if isinstance(device, str | torch.device) and not is_moai(device):
        raise ValueError(f"expected device moai, got {device}")
    if index not in (None, 0):
        raise RuntimeError(f"there is one device moai, moai:0, not moai:{index}")
    return 0


# The device


def is_available() -> bool:
    """True; but False to torch until the program uses the device, since torch uses each available device."""
    return IN_USE.is_set() or not _asked_by_torch()


def _asked_by_torch() -> bool:
    frame = inspect.currentframe()
    caller = frame.f_back.f_back if frame is not None and frame.f_back is not None else None
    return caller is not None and str(caller.f_globals.get("__name__", "")).partition(".")[0] == "torch"


def is_initialized() -> bool:
    return IN_USE.is_set()


def init() -> None:
    _lazy_init()


def device_count() -> int:
    """1: the accelerator is one device, whatever its flavor."""
    return 1


def current_device() -> int:
    return 0


def set_device(device: Any) -> None:
    _check(device)


def get_device_name(device: Any = None) -> str:
    _check(device)
    return "moai virtual accelerator"


def get_device_capability(device: Any = None) -> dict[str, Any]:
    """The element types that tensors of the device may have."""
    _check(device)
    from moaic.runtime.dtypes import DTYPE_NAMES

    return {"supported_dtypes": set(DTYPE_NAMES)}


class device:  # noqa: N801, the name in torch.cuda
    """A context that selects a device; there is only one."""

    def __init__(self, device: Any) -> None:
        self.idx = _check(device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class device_of(device):  # noqa: N801
    """`device` of a tensor."""

    def __init__(self, obj: Any) -> None:
        super().__init__(0)


def synchronize(device: Any = None) -> None:
    """Wait until all queued commands are done; raises the error of a worker that failed."""
    _check(device)
    if IN_USE.is_set():
        _accelerator().synchronize()


def set_flavor(flavor: int | str) -> None:
    """Choose a flavor by its name, or the number of workers; only before the first computation."""
    from moaic.runtime.controller import session

    session.SESSION.set_flavor(flavor)


def report() -> dict[str, Any]:
    """The selected plan, and the times of the steps that led to it."""
    from moaic.support.report import last_step

    return last_step()


def peak_flops(dtype: torch.dtype = torch.float32) -> float:
    """FLOPs per second of matrix products in `dtype` by all workers together, as measured for the planner.

    The denominator of model FLOPs utilization. Raises Diagnostic for a dtype that is not of floating point.
    """
    if not dtype.is_floating_point:
        raise Diagnostic(f"peak_flops counts floating-point operations, of which {dtype} has none")
    _lazy_init()
    from moaic.device.handles import dtype_name
    from moaic.support.this_machine import this_machine

    machine = this_machine()
    return machine.workers * machine.rate("mm", dtype_name(dtype)).value


def _is_in_bad_fork() -> bool:  # pyright: ignore[reportUnusedFunction] torch calls it
    """Whether this process was forked from one that used the device: the workers belong to the parent."""
    return bool(_FORKED)


_FORKED: Final[list[int]] = []


def _note_fork() -> None:
    if IN_USE.is_set():
        _FORKED.append(os.getpid())


os.register_at_fork(after_in_child=_note_fork)


# Random numbers: eager ops on the device draw from the CPU's default generator


def manual_seed(seed: int) -> None:
    """Seed the CPU's default generator, from which the device draws."""
    torch.default_generator.manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    manual_seed(seed)


def seed() -> int:
    return torch.default_generator.seed()


def seed_all() -> int:
    return seed()


def initial_seed() -> int:
    return torch.default_generator.initial_seed()


def get_rng_state(device: Any = NAME) -> torch.Tensor:
    _check(device)
    return torch.default_generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = NAME) -> None:
    _check(device)
    torch.default_generator.set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state()]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    for state in new_states:
        set_rng_state(state)


# Memory


def memory_allocated(device: Any = None) -> int:
    """Bytes of the buffers of all workers together: a tensor that two workers hold counts twice."""
    _check(device)
    return int(memory_stats().get("allocated_bytes.all.current", 0))


def max_memory_allocated(device: Any = None) -> int:
    """Peak of the GPU allocators; for CPU workers the largest value that any memory query has returned."""
    _check(device)
    return int(memory_stats().get("allocated_bytes.all.peak", 0))


def memory_reserved(device: Any = None) -> int:
    return memory_allocated(device)


def max_memory_reserved(device: Any = None) -> int:
    return max_memory_allocated(device)


def memory_stats(device: Any = None) -> OrderedDict[str, Any]:
    """Counts in the form of torch.cuda.memory_stats; empty before the device is used."""
    _check(device)
    if not IN_USE.is_set():
        return OrderedDict()
    from moaic.device.usage import memory_stats as stats

    return stats()


def reset_peak_memory_stats(device: Any = None) -> None:
    _check(device)
    if IN_USE.is_set():
        from moaic.device.usage import reset_peak

        reset_peak()


def reset_accumulated_memory_stats(device: Any = None) -> None:
    _check(device)


def get_memory_info(device: Any = None) -> tuple[int, int]:
    """Free and total bytes of this host's memory, in which local workers live."""
    _check(device)
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return get_memory_info(device)


def empty_cache() -> None:
    """No effect: workers release memory as soon as it is free."""


def empty_host_cache() -> None:
    """No effect: there is no pinned memory."""


# Streams: the accelerator runs its commands in order, so there is one stream


class Stream:
    """The accelerator's only stream."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        _check(device)
        self.device_type = NAME
        self.device_index = 0
        self.stream_id = 0
        self.device = torch.device(NAME, 0)

    def synchronize(self) -> None:
        synchronize()

    def query(self) -> bool:
        synchronize()
        return True

    def wait_event(self, event: Any) -> None:
        """No effect: commands run in order."""

    def wait_stream(self, stream: Any) -> None:
        """No effect: there is one stream."""

    def record_event(self, event: Event | None = None) -> Event:
        recorded = event or Event()
        recorded.record(self)
        return recorded

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return hash((NAME, 0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class Event:
    """A position in the command stream; with `enable_timing`, `record` waits for it, so that times are exact."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.enable_timing = enable_timing
        self._time: float | None = None

    def record(self, stream: Any = None) -> None:
        if self.enable_timing:
            synchronize()
        self._time = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """No effect: commands run in order."""

    def query(self) -> bool:
        synchronize()
        return True

    def synchronize(self) -> None:
        synchronize()

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to `end_event`."""
        if self._time is None or end_event._time is None or not (self.enable_timing and end_event.enable_timing):
            raise ValueError("both events must be made with enable_timing=True and recorded")
        return (end_event._time - self._time) * 1000


def current_stream(device: Any = None) -> Stream:
    return Stream(device)


def default_stream(device: Any = None) -> Stream:
    return Stream(device)


def set_stream(stream: Any) -> None:
    """No effect: there is one stream."""


def stream(stream: Any) -> Any:
    return stream if stream is not None else Stream()


# Mixed precision


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(including_emulation: bool = False) -> bool:
    """Whether the workers multiply in bfloat16 at least as fast as in float32: measured once per machine.

    With `including_emulation` whether they can at all.
    """
    from moaic.support.this_machine import this_machine

    return including_emulation or this_machine().slowdown("bf16") <= 1


def is_autocast_available() -> bool:
    return True


_PARTS: Final = {"option": "moaic.option", "profiler": "moaic.device.profiler"}
"""Submodules, imported at first use."""


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return importlib.import_module(_PARTS[name])
    raise AttributeError(f"torch.moai has no {name}")
