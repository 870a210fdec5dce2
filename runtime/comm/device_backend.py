"""The device of a worker, CPU or GPU, behind one interface: every difference between the two is here.

Code that makes tensors or asks for memory is given a backend.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from moaic.runtime.host.gpus import CPU, narrowed
from moaic.runtime.host.memory import data_bytes, free_bytes, proportional_bytes

Result = TypeVar("Result")
Run = Callable[[list[Tensor]], Result]

BEHIND: Final = 2
"""Most collectives in flight on a GPU: each keeps the memory of its operands."""


class Moment(Protocol):
    """When a device has done all that had been enqueued on its first stream."""

    @property
    def has_come(self) -> bool: ...

    def seconds_since(self, earlier: Moment) -> float:
        """Seconds from another moment of the same device; waits until this one has come."""
        ...


class DeviceBackend(Protocol):
    """One device, of which a worker makes all its tensors."""

    @property
    def device(self) -> torch.device: ...

    @property
    def compiled_for(self) -> torch.device:
        """The device that functions are compiled for: another one than `device` if that emulates it."""
        ...

    def begin(self) -> None:
        """Makes it this process's device, before anything is made on it."""
        ...

    def staging(self, size: int) -> Tensor:
        """Memory of the host for so many bytes that are on their way to the device."""
        ...

    def to_device(self, tensor: Tensor) -> Tensor:
        """A tensor of the host on the device; itself where that is the same."""
        ...

    def run_async(self, run: Run[Result], operands: list[Tensor]) -> Callable[[], Result]:
        """Starts `run` on the side stream, after all work enqueued so far and concurrent with all work enqueued later.

        Returns a function that gives the result, to be called before the result is read.
        """
        ...

    @property
    def records(self) -> bool:
        """Whether the device can replay recorded work (a CUDA graph)."""
        ...

    @property
    def is_recording(self) -> bool:
        """Whether enqueued work is being recorded instead of executed."""
        ...

    def record(self, run: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        """Captures `run` into a CUDA graph without executing it; gives a replay function and the result of `run`.

        Each replay writes into the memory of that result. Raises RuntimeError if an op cannot be captured, or memory is
        short.
        """
        ...

    def moment(self) -> Moment:
        """When all work enqueued so far is done; not while recording."""
        ...

    def synchronize(self) -> None:
        """Returns once all that was begun here is done."""
        ...

    def resident_bytes(self) -> int:
        """Bytes of the device's memory that this process has, shared ones by their share."""
        ...

    def device_bytes(self) -> int:
        """Bytes that tensors of this process take of a memory that is not the host's."""
        ...

    def private_bytes(self) -> int:
        """Bytes of the device's memory that are this process's alone."""
        ...

    def free_bytes(self) -> int:
        """Bytes that this process can still get."""
        ...

    def peak(self) -> int:
        """Most bytes that tensors took at a time, where the allocator counts them, else 0."""
        ...

    def forget_peak(self) -> None:
        """Resets the peak to the bytes in use now."""
        ...

    def launches(self) -> Mapping[str, int]:
        """Launches of Triton kernels by name, where they are counted."""
        ...


@dataclass(frozen=True, slots=True)
class HostMoment:
    """A moment of a device that does everything at once."""

    seconds: float
    has_come: bool = True

    def seconds_since(self, earlier: Moment) -> float:
        assert isinstance(earlier, HostMoment)
        return self.seconds - earlier.seconds


@dataclass(frozen=True, slots=True)
class CpuBackend:
    """Cores of the host, and its memory."""

    @property
    def device(self) -> torch.device:
        return torch.device(CPU)

    @property
    def compiled_for(self) -> torch.device:
        return self.device

    def begin(self) -> None:
        pass

    def staging(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor

    def run_async(self, run: Run[Result], operands: list[Tensor]) -> Callable[[], Result]:
        result = run(operands)
        return lambda: result

    @property
    def records(self) -> bool:
        return False

    @property
    def is_recording(self) -> bool:
        return False

    def record(self, run: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        raise RuntimeError("a CPU records nothing")

    def moment(self) -> Moment:
        return HostMoment(time.perf_counter())

    def synchronize(self) -> None:
        pass

    def resident_bytes(self) -> int:
        return proportional_bytes("self")

    def device_bytes(self) -> int:
        return 0

    def private_bytes(self) -> int:
        return data_bytes("self")

    def free_bytes(self) -> int:
        return free_bytes()

    def peak(self) -> int:
        return 0

    def forget_peak(self) -> None:
        pass

    def launches(self) -> Mapping[str, int]:
        return {}


@dataclass(frozen=True, slots=True)
class GpuMoment:
    """A moment of a stream of a GPU."""

    event: torch.cuda.Event

    @property
    def has_come(self) -> bool:
        return self.event.query()

    def seconds_since(self, earlier: Moment) -> float:
        assert isinstance(earlier, GpuMoment)
        self.event.synchronize()
        return earlier.event.elapsed_time(self.event) / 1e3


class GpuBackend:
    """A GPU of the host, NVIDIA's or AMD's: PyTorch calls both `cuda`.

    Memory in use is what its allocator has given to tensors; the rest of what it reserves counts as free.
    """

    def __init__(self, device: torch.device, visibility: Mapping[str, str]) -> None:
        """`visibility` are the environment variables to set before the GPU is initialised."""
        self.device = self.compiled_for = device
        self._visibility = visibility
        self.is_recording = False
        self._pools = WeakKeyDictionary[torch.cuda.CUDAGraph, int]()
        """Per recording the bytes that the allocator keeps for it alone."""

    def begin(self) -> None:
        os.environ.update(self._visibility)
        torch.cuda.set_device(self.device)
        # float32 is not rounded to TF32: convolutions are the only ops that PyTorch would round by default.
        torch.backends.cudnn.allow_tf32 = False
        # Collectives are short and waited for: the side stream has priority over computation.
        self._side = torch.cuda.Stream(self.device, priority=-1)
        self._behind: deque[tuple[torch.cuda.Event, list[Tensor]]] = deque()

    def staging(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def to_device(self, tensor: Tensor) -> Tensor:
        # From pinned memory the copy is asynchronous; the allocator keeps that memory until the copy is done.
        staged = tensor if tensor.is_pinned() else tensor.pin_memory()
        return staged.to(self.device, non_blocking=True)

    def run_async(self, run: Run[Result], operands: list[Tensor]) -> Callable[[], Result]:
        if len(self._behind) == BEHIND:
            self._wait_for(self._behind[0][0])
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            result = run([*operands])
            done = torch.cuda.Event()
            done.record(self._side)
        # Keeps the operands' memory, which belongs to the computing stream, and marks it as shared: it is not
        # overwritten.
        self._behind.append((done, [operand.detach() for operand in operands]))
        return partial(self._finished, done, result)

    def _finished(self, done: torch.cuda.Event, result: Result) -> Result:
        """Memory of `result` belongs to the side stream, which waits for all its readers before it begins anything."""
        self._wait_for(done)
        return result

    def _wait_for(self, done: torch.cuda.Event) -> None:
        """Has all work enqueued from now on wait for one event, and so for all earlier ones."""
        torch.cuda.current_stream(self.device).wait_event(done)
        while done in [each for each, _ in self._behind]:
            self._behind.popleft()

    @property
    def records(self) -> bool:
        return True

    def record(self, run: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        assert not self._behind, "what was begun before would be waited for at each repetition"
        graph, stream, idle = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device), self._idle()
        self.is_recording = True
        try:
            # Threads of NCCL ask at any time how far their work is, which would end a recording of all threads.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                result = run()
        finally:
            self.is_recording = False
            self._behind.clear()
            # A recording that fails leaves the stream that it was made on.
            torch.cuda.set_stream(stream)
        self._pools[graph] = max(0, self._idle() - idle)
        return graph.replay, result

    def moment(self) -> Moment:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return GpuMoment(event)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def resident_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def device_bytes(self) -> int:
        return self.resident_bytes()

    def private_bytes(self) -> int:
        return self.resident_bytes()

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + self._idle() - sum(self._pools.values())

    def _idle(self) -> int:
        """Bytes that the allocator keeps and no tensor has."""
        return torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def launches(self) -> Mapping[str, int]:
        return {}


def backend_of(name: str) -> DeviceBackend:
    """The device called `cpu` or `cuda:N`."""
    if name == CPU:
        return CpuBackend()
    index = int(name.removeprefix("cuda:"))
    # If each worker sees only its own GPU, as the first, kernels compiled by one worker are found in the cache by all.
    visibility = narrowed(index, os.environ)
    return GpuBackend(torch.device("cuda", 0 if visibility else index), visibility)
