"""Workers of this host. No code above this folder depends on how a worker was started, and where."""

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
from typing import Final, Generic, TypeVar

from moaic.ir.errors import Diagnostic
from moaic.runtime.host.cores import cores, share_out
from moaic.runtime.host.gpus import CPU
from moaic.runtime.host.memory import oom_kills
from moaic.runtime.host.status import Status
from moaic.runtime.host.worker_kinds import INTERPRETED, emulated_target, takes_all_kernels
from moaic.runtime.protocol.block_checks import check_answer
from moaic.runtime.protocol.carrier import Carrier
from moaic.runtime.protocol.frames import BlockMemory, Connection, Message, encode
from moaic.runtime.protocol.peers import Peers
from moaic.runtime.protocol.shared_memory import create_memory, create_store

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


Block = TypeVar("Block")


@dataclass(frozen=True, slots=True)
class LocalWorker(Generic[Block]):
    """The channel to a worker of this host."""

    rank: int
    connection: Connection[Block]

    @property
    def ranks(self) -> range:
        return range(self.rank, self.rank + 1)

    @property
    def closed(self) -> bool:
        return self.connection.closed

    def fileno(self) -> int:
        return self.connection.fileno()

    def post(self, bodies: Sequence[bytes | None], rows: Sequence[Sequence[Block | None]]) -> int:
        (body,), (row,) = bodies, rows
        return 0 if body is None else self.connection.post(body, row)

    def push(self) -> bool:
        return self.connection.push()

    def pull(self) -> None:
        self.connection.pull()

    def check(self) -> None:
        self.connection.check()

    def next(self) -> tuple[int, Message[Block]] | None:
        message = self.connection.next()
        return None if message is None else (self.rank, message)

    def ended(self) -> Sequence[int]:
        return self.ranks if self.connection.closed else ()

    def close(self) -> None:
        self.connection.close()


@dataclass(frozen=True, slots=True)
class LocalWorkers(Generic[Block]):
    """Workers of this host, of consecutive ranks, and the status lines of all workers in shared memory."""

    channels: tuple[LocalWorker[Block], ...]
    fork_server: ForkServer
    status: Status
    devices: tuple[str, ...]
    """Of the workers of this host."""
    carrier: Carrier

    @property
    def hosts(self) -> tuple[str, ...]:
        return ("",) * len(self.channels)

    def ending(self, rank: int) -> str | None:
        refusal = self.channels[rank - self.channels[0].rank].connection.refusal
        if refusal:
            return f"its answer could not be received: {refusal}"
        ending = self.fork_server.ending(rank)
        return None if ending is None else f"the process {ending}"

    def is_stopped(self, rank: int) -> bool:
        return self.fork_server.is_stopped(rank)

    def kill(self, rank: int) -> None:
        self.fork_server.kill(rank)

    def close(self) -> None:
        self._close_sockets()
        self.fork_server.close()
        self.status.close()

    def kill_all(self) -> None:
        self._close_sockets()
        self.fork_server.kill_all()
        self.status.close()

    def _close_sockets(self) -> None:
        for worker in self.channels:
            worker.close()


@dataclass(frozen=True, slots=True)
class LocalShare:
    """The part of all workers that one host starts, if there are other hosts."""

    peers: Peers
    listeners: tuple[socket.socket, ...]
    """Where each worker of this host waits for links of the others; closed here once they have them."""
    store: tuple[socket.socket, ...] = ()
    """Where the first worker serves the store of process groups, if it is of this host; closed here as well."""


def start(
    count: int,
    blocks: BlockMemory[Block],
    environment: Mapping[str, str] | None = None,
    *,
    devices: Sequence[str] = (),
    carrier: Carrier | None = None,
    share: LocalShare | None = None,
) -> LocalWorkers[Block]:
    """Start `count` workers and return at once; each sends HELLO when it is ready.

    `environment` is added to that of this process. `devices` has one device for each worker, by default the CPU;
    `carrier` is by default the one for these devices. Messages have their blocks in memory of `blocks`. Raises
    Diagnostic for an invalid MOAI_KERNELS, and for emulated GPUs without Triton.
    """
    devices = tuple(devices) or (CPU,) * count
    carrier = carrier or carrier_for(devices)
    check_kinds(devices, {**os.environ, **(environment or {})})
    first, ranks = (0, count) if share is None else (share.peers.first, len(share.peers.addresses))
    memory, store = create_memory(ranks), _store(share)
    liveness_pipes = [end for _ in range(count) for end in os.pipe()]
    reports, reporter = os.pipe()
    pairs = [socket.socketpair() for _ in range(count)]
    sockets = [end.fileno() for _, end in pairs]
    for end in (end for pair in pairs for end in pair):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    threads = share_out(cores(), count)
    numbers = {"memory": [memory], "store": [store], "reports": [reporter]}
    numbers |= {"sockets": sockets, "liveness-pipes": liveness_pipes, "threads": list(threads)}
    numbers |= {"first": [first], "ranks": [ranks]}
    given = [memory, store, reporter, *sockets, *liveness_pipes]
    of_share: list[int] = []
    if share is not None:
        of_share = [_file_of(encode(share.peers.encoded())), *(each.fileno() for each in share.listeners)]
        numbers |= {"peers": of_share[:1], "listeners": of_share[1:]}
    command = [sys.executable, *_flags(), "-m", "moaic.runtime.worker.fork_server"]
    for name, values in numbers.items():
        command += [f"--{name}", *(str(value) for value in values)]
    command += ["--devices", *devices, "--carrier", carrier]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=(*given, *of_share),
            env=_environment(max(threads), devices, environment or {}),
            start_new_session=True,
        )
    finally:
        for descriptor in (store, reporter, *liveness_pipes, *of_share[:1]):
            os.close(descriptor)
        for _, end in pairs:
            end.close()
        for listener in (*share.listeners, *share.store) if share is not None else ():
            listener.close()
    fork_server = ForkServer(process, reports)
    connections = [Connection(end, blocks, check_answer) for end, _ in pairs]
    workers = tuple(LocalWorker(first + index, connection) for index, connection in enumerate(connections))
    status = Status(memory, ranks)
    os.close(memory)
    return LocalWorkers(workers, fork_server, status, devices, carrier)


def _store(share: LocalShare | None) -> int:
    """The descriptor by which process groups meet."""
    return os.dup(share.store[0].fileno()) if share is not None and share.store else create_store()


def _file_of(data: bytes) -> int:
    """A descriptor of a file without a name that holds the data."""
    descriptor = os.memfd_create("moaic-peers", os.MFD_CLOEXEC)
    os.write(descriptor, data)
    return descriptor


def check_kinds(devices: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raises Diagnostic for an invalid MOAI_KERNELS, and for emulated GPUs without Triton."""
    takes_all_kernels(environment)
    if any(map(emulated_target, devices)) and find_spec("triton") is None:
        raise Diagnostic(
            "workers that emulate a GPU need Triton, which is not installed", hint="pip install 'moaic[gpu]'"
        )


def carrier_for(devices: Sequence[str], *, is_private: bool = True) -> Carrier:
    """The carrier for the workers of a host on these devices; if not `is_private`, others reach what carries the data.

    NCCL needs a GPU per worker, Gloo serves workers that share one. Neither encrypts.
    """
    if set(devices) == {CPU} or not is_private:
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
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""Settings for workers on GPUs, one reason each, in order:

Expandable segments avoid fragmentation of PyTorch's allocator. An NVML-based check finds GPUs without a CUDA context: a
process that has one must not fork. NCCL must not register the memory of CUDA graphs: up to version 2.28 ranks may
decide differently while that memory grows, and deadlock. NCCL runs the collectives of several groups in launch order,
which is the same on all ranks. The store of process groups would warn of each host whose address has no name."""


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
    environment.pop("MOAI_TOKEN", None)
    root = _root()
    if root is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), root)))
    return environment


def _root() -> str | None:
    """The folder from which moaic is imported, unless it is one of Python's own."""
    folder = Path(__file__).absolute().parents[3]
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    return None if folder.resolve() in installed else str(folder)
