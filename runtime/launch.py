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

from moaic.runtime.shared import Activity, Status, create_memory
from moaic.runtime.threads import cores, share_out
from moaic.runtime.wire import Connection

END_SECONDS: Final = 2.0
"""A worker whose socket has ended is given this long before it is killed."""

BUFFER_BYTES: Final = 4 << 20
"""Asked for as the sockets' buffers; the system grants what it likes."""


@dataclass(frozen=True, slots=True)
class LocalWorker:
    """A worker process of this host and our end of its socket."""

    rank: int
    process: subprocess.Popen[bytes]
    connection: Connection

    def ending(self) -> str | None:
        """How the process ended; None while it lives."""
        code = self.process.poll()
        if code is None:
            return None
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def kill(self) -> None:
        """Kills the process and all it started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self.process.kill()


@dataclass(frozen=True, slots=True)
class LocalWorkers:
    """All workers of this host, and the lines where they say what they do."""

    workers: tuple[LocalWorker, ...]
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
        for worker in self.workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(END_SECONDS)
            worker.kill()
            worker.process.wait()
        self.status.close()


def launch(count: int, environment: Mapping[str, str] | None = None) -> LocalWorkers:
    """Starts `count` workers; returns at once, each says hello when it is ready. `environment` is added to ours."""
    memory = create_memory(count)
    lifelines = [os.pipe() for _ in range(count)]
    shares = share_out(cores(), count)
    try:
        workers = tuple(_start(rank, shares, memory, lifelines, environment or {}) for rank in range(count))
        return LocalWorkers(workers, Status(memory, count))
    finally:
        for descriptor in (memory, *(end for pipe in lifelines for end in pipe)):
            os.close(descriptor)


def _start(
    rank: int,
    threads: Sequence[int],
    memory: int,
    lifelines: Sequence[tuple[int, int]],
    environment: Mapping[str, str],
) -> LocalWorker:
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    own = lifelines[rank][1]
    others = [reader for peer, (reader, _) in enumerate(lifelines) if peer != rank]
    command = [sys.executable, *_flags(), "-m", "moaic.runtime.worker"]
    numbers = {
        "rank": rank,
        "ranks": len(threads),
        "socket": theirs.fileno(),
        "memory": memory,
        "threads": threads[rank],
    }
    command += [f"--{name}={number}" for name, number in numbers.items()]
    command += ["--own-lifeline", str(own), "--lifelines", *(str(other) for other in others)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        pass_fds=(theirs.fileno(), memory, own, *others),
        env=_environment(threads[rank], environment),
        start_new_session=True,
    )
    theirs.close()
    return LocalWorker(rank, process, Connection(ours))


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


def _environment(threads: int, more: Mapping[str, str]) -> dict[str, str]:
    count = str(threads)
    environment = {
        "TORCHINDUCTOR_COMPILE_THREADS": count,
        **KEEP_MEMORY,
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
    folder = Path(__file__).absolute().parents[2]
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    return None if folder.resolve() in installed else str(folder)
