"""Launch of local workers. No code above this file depends on how a worker was started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from torch import Tensor

from moaic.ir.errors import Diagnostic
from moaic.runtime.host.cores import cores, share_out
from moaic.runtime.host.gpus import CPU
from moaic.runtime.host.memory import oom_kills
from moaic.runtime.host.status import Activity, Status
from moaic.runtime.host.worker_kinds import INTERPRETED, emulated_target, takes_all_kernels
from moaic.runtime.protocol.block_checks import check_answer
from moaic.runtime.protocol.carrier import Carrier
from moaic.runtime.protocol.frames import Connection
from moaic.runtime.protocol.shared_memory import create_memory, create_store
from moaic.runtime.protocol.wire import TENSORS

END_SECONDS: Final = 1.0
"""Time that workers have to end after their sockets are closed; then they are killed."""

REPORTS_BYTES: Final = 1 << 16
"""More than a pipe holds, so that one read returns whole lines: each is written at once."""

BUFFER_BYTES: Final = 4 << 20
"""Requested size of the sockets' send buffers; the kernel may grant less."""


class ForkServer:
    """The process that forks the workers, and its reports about them (`worker/fork_server.py`)."""

    def __init__(self, process: subprocess.Popen[bytes], reports: int) -> None:
        os.set_blocking(reports, False)
        self._process = process
        self._reports = reports
        self._reported: dict[tuple[int, str], int] = {}
        self._oom_kills = oom_kills()

    def ending(self, rank: int) -> str | None:
        """The end of a worker, or of the fork server before it reported one, in words; None while no end is known."""
        self._listen()
        code = self._reported.get((rank, "ended"), self._process.poll())
        if code is None:
            return None
        if code == -signal.SIGKILL and oom_kills() > self._oom_kills:
            return "was killed by SIGKILL while the kernel was out of memory and killed processes"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def is_stopped(self, rank: int) -> bool:
        """Whether a signal, such as SIGSTOP, has suspended the worker."""
        self._listen()
        return (rank, "stopped") in self._reported

    def kill(self, rank: int) -> None:
        """Kill a worker and its children, or the fork server if it has not reported that worker yet."""
        self._listen()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._reported.get((rank, "pid"), self._process.pid), signal.SIGKILL)

    def close(self) -> None:
        """Wait for the workers to end after their sockets were closed; kill those that take too long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self.kill_all()

    def kill_all(self) -> None:
        """Kill the fork server and all workers; one that has not been reported yet ends as its socket is closed."""
        self._listen()
        for rank in [rank for rank, word in self._reported if word == "pid" and (rank, "ended") not in self._reported]:
            self.kill(rank)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._reports)

    def _listen(self) -> None:
        try:
            text = os.read(self._reports, REPORTS_BYTES).decode()
        except BlockingIOError:
            return
        for line in text.splitlines():
            rank, word, number = line.split()
            self._reported[int(rank), word] = int(number)
            if word == "continued":
                self._reported.pop((int(rank), "stopped"), None)


@dataclass(frozen=True, slots=True)
class LocalWorker:
    """A worker process of this host and the controller's end of its socket."""

    rank: int
    fork_server: ForkServer
    connection: Connection[Tensor]

    def ending(self) -> str | None:
        """The end of the process in words, such as `ended with exit code 1`; None while it lives."""
        return self.fork_server.ending(self.rank)

    def is_stopped(self) -> bool:
        """Whether a signal, such as SIGSTOP, has suspended the process."""
        return self.fork_server.is_stopped(self.rank)

    def kill(self) -> None:
        """Kill the process and its children."""
        self.fork_server.kill(self.rank)


@dataclass(frozen=True, slots=True)
class LocalWorkers:
    """All workers of this host, and their status lines in shared memory."""

    workers: tuple[LocalWorker, ...]
    fork_server: ForkServer
    status: Status
    devices: tuple[str, ...]
    """By rank."""

    def activity(self, rank: int) -> Activity:
        return self.status.activity(rank)

    def has_compiled(self, number: int) -> bool:
        """Whether compilation in the background has ended on all workers for the first `number` programs with it."""
        return all(self.status.compiled(worker.rank) >= number for worker in self.workers)

    def beats(self, rank: int) -> int:
        """Heartbeats of the worker so far."""
        return self.status.beats(rank)

    def close_sockets(self) -> None:
        """Close this process's ends of the sockets: this ends the workers, unless a forked child does it."""
        for worker in self.workers:
            worker.connection.close()

    def close(self) -> None:
        """End the workers and wait until they have ended."""
        self.close_sockets()
        self.fork_server.close()
        self.status.close()

    def kill(self) -> None:
        """End workers that have done nothing yet, without waiting for them to be ready for it."""
        self.close_sockets()
        self.fork_server.kill_all()
        self.status.close()


def launch(
    count: int,
    environment: Mapping[str, str] | None = None,
    *,
    devices: Sequence[str] = (),
    carrier: Carrier | None = None,
) -> LocalWorkers:
    """Start `count` workers and return at once; each sends HELLO when it is ready.

    `environment` is added to that of this process. `devices` has one device for each worker, by default the CPU;
    `carrier` is by default the one for these devices. Raises Diagnostic for an invalid MOAI_KERNELS, and for emulated
    GPUs without Triton.
    """
    devices = tuple(devices) or (CPU,) * count
    _check_kinds(devices)
    memory, store = create_memory(count), create_store()
    liveness_pipes = [end for _ in range(count) for end in os.pipe()]
    reports, reporter = os.pipe()
    pairs = [socket.socketpair() for _ in range(count)]
    sockets = [end.fileno() for _, end in pairs]
    for end in (end for pair in pairs for end in pair):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    threads = share_out(cores(), count)
    numbers = {"memory": [memory], "store": [store], "reports": [reporter]}
    numbers |= {"sockets": sockets, "liveness-pipes": liveness_pipes, "threads": list(threads)}
    command = [sys.executable, *_flags(), "-m", "moaic.runtime.worker.fork_server"]
    for name, values in numbers.items():
        command += [f"--{name}", *(str(value) for value in values)]
    command += ["--devices", *devices, "--carrier", carrier or carrier_for(devices)]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=(memory, store, reporter, *sockets, *liveness_pipes),
            env=_environment(max(threads), devices, environment or {}),
            start_new_session=True,
        )
    finally:
        for descriptor in (store, reporter, *liveness_pipes):
            os.close(descriptor)
        for _, end in pairs:
            end.close()
    fork_server = ForkServer(process, reports)
    connections = [Connection(end, TENSORS, check_answer) for end, _ in pairs]
    workers = tuple(LocalWorker(rank, fork_server, connection) for rank, connection in enumerate(connections))
    status = Status(memory, count)
    os.close(memory)
    return LocalWorkers(workers, fork_server, status, devices)


def _check_kinds(devices: Sequence[str]) -> None:
    takes_all_kernels(os.environ)
    if any(map(emulated_target, devices)) and find_spec("triton") is None:
        raise Diagnostic(
            "workers that emulate a GPU need Triton, which is not installed", hint="pip install 'moaic[gpu]'"
        )


def carrier_for(devices: Sequence[str]) -> Carrier:
    """The carrier for workers on these devices: NCCL needs a GPU per worker, Gloo serves workers that share one."""
    if set(devices) == {CPU}:
        return Carrier.MEMORY
    if any(map(emulated_target, devices)):
        return Carrier.GLOO
    return Carrier.NCCL if len(set(devices)) == len(devices) else Carrier.GLOO


def _flags() -> list[str]:
    """Flags of the workers' Python. `-P`: files in the working directory must not shadow standard modules."""
    return ["-P"]


KEEP_MEMORY: Final[Mapping[str, str]] = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""Settings by which glibc keeps freed memory for the next step, instead of faulting in fresh pages.

This saves 4 to 8 % of a step's time at the same peak. 32 MiB is the largest threshold that glibc accepts.
"""


FOR_GPUS: Final[Mapping[str, str]] = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "NCCL_GRAPH_REGISTER": "0",
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
}
"""Settings for workers on GPUs, one reason each, in order:

Expandable segments avoid fragmentation of PyTorch's allocator. An NVML-based check finds GPUs without a CUDA context: a
process that has one must not fork. NCCL must not register the memory of CUDA graphs: up to version 2.28 ranks may
decide differently while that memory grows, and deadlock. NCCL runs the collectives of several groups in launch order,
which is the same on all ranks."""


EMULATING: Final[Mapping[str, str]] = {INTERPRETED: "1", "MALLOC_PERTURB_": "85"}
"""Settings for workers that emulate a GPU: Triton interprets kernels, and glibc fills the memory that is freed."""


def _environment(threads: int, devices: Sequence[str], additions: Mapping[str, str]) -> dict[str, str]:
    count = str(threads)
    environment = {
        "TORCHINDUCTOR_COMPILE_THREADS": count,
        **KEEP_MEMORY,
        **({} if set(devices) == {CPU} else FOR_GPUS),
        **os.environ,
        **(EMULATING if any(map(emulated_target, devices)) else {}),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        **additions,
    }
    root = _root()
    if root is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), root)))
    return environment


def _root() -> str | None:
    """The folder from which moaic is imported, unless it is one of Python's own."""
    folder = Path(__file__).absolute().parents[3]
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    return None if folder.resolve() in installed else str(folder)
