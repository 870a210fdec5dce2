"""Starting local workers. Nothing above this file relies on how a worker came to be."""

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
from pathlib import Path
from typing import Final

from moaic.runtime.host.cores import cores, share_out
from moaic.runtime.host.gpus import CPU
from moaic.runtime.host.memory import oom_kills
from moaic.runtime.host.status import Activity, Status
from moaic.runtime.protocol.carrier import Carrier
from moaic.runtime.protocol.shared_memory import create_memory, create_store
from moaic.runtime.protocol.wire import Connection

END_SECONDS: Final = 2.0
"""A worker whose socket has ended is given this long before it is killed."""

REPORTS_BYTES: Final = 1 << 16
"""More than a pipe holds. Its lines are written whole, and so they are read."""

BUFFER_BYTES: Final = 4 << 20
"""Asked for as the sockets' buffers; the system grants what it likes."""


class Nursery:
    """The process that our workers are forked from, and what it has said of them."""

    def __init__(self, process: subprocess.Popen[bytes], reports: int) -> None:
        os.set_blocking(reports, False)
        self._process = process
        self._reports = reports
        self._said: dict[tuple[int, str], int] = {}
        self._oom_kills = oom_kills()

    def ending(self, rank: int) -> str | None:
        """How a worker, or the nursery before it could say so, ended; None for all that is known while it lives."""
        self._listen()
        code = self._said.get((rank, "ended"), self._process.poll())
        if code is None:
            return None
        if code == -signal.SIGKILL and oom_kills() > self._oom_kills:
            return "was killed by SIGKILL while the kernel was out of memory and killed processes"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def is_stopped(self, rank: int) -> bool:
        """Whether somebody has stopped the worker by a signal."""
        self._listen()
        return (rank, "stopped") in self._said

    def kill(self, rank: int) -> None:
        """Kills a worker and all it started; before it is there, the nursery."""
        self._listen()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._said.get((rank, "pid"), self._process.pid), signal.SIGKILL)

    def close(self) -> None:
        """Waits for the end of the workers, whose sockets are closed; kills those that take too long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self._listen()
        for rank in [rank for rank, word in self._said if word == "pid" and (rank, "ended") not in self._said]:
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
            self._said[int(rank), word] = int(number)
            if word == "continued":
                self._said.pop((int(rank), "stopped"), None)


@dataclass(frozen=True, slots=True)
class LocalWorker:
    """A worker process of this host and our end of its socket."""

    rank: int
    nursery: Nursery
    connection: Connection

    def ending(self) -> str | None:
        """How the process ended; None while it lives."""
        return self.nursery.ending(self.rank)

    def is_stopped(self) -> bool:
        """Whether somebody has stopped the process by a signal."""
        return self.nursery.is_stopped(self.rank)

    def kill(self) -> None:
        """Kills the process and all it started."""
        self.nursery.kill(self.rank)


@dataclass(frozen=True, slots=True)
class LocalWorkers:
    """All workers of this host, and the lines where they say what they do."""

    workers: tuple[LocalWorker, ...]
    nursery: Nursery
    status: Status

    def activity(self, rank: int) -> Activity:
        return self.status.activity(rank)

    def beats(self, rank: int) -> int:
        """Signs of life that the worker has given."""
        return self.status.beats(rank)

    def close_sockets(self) -> None:
        """Closes our ends: in this process the workers end by that, in a forked child they do not notice."""
        for worker in self.workers:
            worker.connection.close()

    def close(self) -> None:
        """Ends the workers and waits for it."""
        self.close_sockets()
        self.nursery.close()
        self.status.close()


def launch(
    count: int,
    environment: Mapping[str, str] | None = None,
    *,
    devices: Sequence[str] = (),
    carrier: Carrier | None = None,
) -> LocalWorkers:
    """Starts `count` workers; returns at once, each says hello when it is ready. `environment` is added to ours.

    `devices` has one for each worker, else all compute on the CPU; `carrier` is the one for these devices, if none is
    named.
    """
    devices = tuple(devices) or (CPU,) * count
    memory, store = create_memory(count), create_store()
    lifelines = [end for _ in range(count) for end in os.pipe()]
    reports, reporter = os.pipe()
    pairs = [socket.socketpair() for _ in range(count)]
    theirs = [their.fileno() for _, their in pairs]
    for end in (end for pair in pairs for end in pair):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    threads = share_out(cores(), count)
    numbers = {"memory": [memory], "store": [store], "reports": [reporter]}
    numbers |= {"sockets": theirs, "lifelines": lifelines, "threads": list(threads)}
    command = [sys.executable, *_flags(), "-m", "moaic.runtime.worker.fork_server"]
    for name, values in numbers.items():
        command += [f"--{name}", *(str(value) for value in values)]
    command += ["--devices", *devices, "--carrier", carrier or carrier_for(devices)]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=(memory, store, reporter, *theirs, *lifelines),
            env=_environment(max(threads), devices, environment or {}),
            start_new_session=True,
        )
    finally:
        for descriptor in (store, reporter, *lifelines):
            os.close(descriptor)
        for _, their in pairs:
            their.close()
    nursery = Nursery(process, reports)
    workers = tuple(LocalWorker(rank, nursery, Connection(ours)) for rank, (ours, _) in enumerate(pairs))
    status = Status(memory, count)
    os.close(memory)
    return LocalWorkers(workers, nursery, status)


def carrier_for(devices: Sequence[str]) -> Carrier:
    """What carries data between workers of these devices; no two of what joins GPUs may be on one of them."""
    if set(devices) == {CPU}:
        return Carrier.MEMORY
    return Carrier.NCCL if len(set(devices)) == len(devices) else Carrier.GLOO


def _flags() -> list[str]:
    """The folder that we are in must not hide modules of Python's own from a worker."""
    return ["-P"]


KEEP_MEMORY: Final[Mapping[str, str]] = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""glibc keeps what a step has freed for the next step, instead of faulting in fresh pages: 4 to 8 % of a step's time at
the same peak. 32 MiB is the most that glibc takes as a threshold."""


FOR_GPUS: Final[Mapping[str, str]] = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "NCCL_GRAPH_REGISTER": "0",
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
}
"""PyTorch's allocator grows what it has instead of taking pieces that do not fit together later; who asks whether there
are GPUs does not start them, after which no process may be forked. NCCL is not to register the memory of what is
recorded: up to 2.28 ranks may decide otherwise each where that memory grows, and then wait for one another for good. Of
several groups it takes collectives in the order in which they are asked for, which is one on all ranks."""


def _environment(threads: int, devices: Sequence[str], more: Mapping[str, str]) -> dict[str, str]:
    count = str(threads)
    environment = {
        "TORCHINDUCTOR_COMPILE_THREADS": count,
        **KEEP_MEMORY,
        **({} if set(devices) == {CPU} else FOR_GPUS),
        **os.environ,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        **more,
    }
    root = _root()
    if root is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), root)))
    return environment


def _root() -> str | None:
    """The folder that moaic is imported from, if Python would not look there by itself."""
    folder = Path(__file__).absolute().parents[3]
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    return None if folder.resolve() in installed else str(folder)
