"""The fork server of a host: a process that imports the libraries once and forks one worker per device.

The launcher starts `python -m moaic.runtime.worker.fork_server` with the descriptors that the workers need. The server
has one thread and no device context when it forks. It then reports on a pipe when workers are stopped, continue or end,
forks the processes that compile in the background for them, and ends after the last worker.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import select
import signal
import socket
import traceback
import warnings
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Final

from moaic.runtime.host.env_flags import awaits_compiler, may_compile
from moaic.runtime.host.gpus import CPU

Report = Callable[[int, str, int], None]
"""Takes the rank of a worker, a word for what happened, and its number: a pid, signal or exit code."""

LOOK_SECONDS: Final = 0.2
"""Time between two looks at the program during imports."""

WAKE_UPS: Final = 4096
"""Bytes read from the pipe of signals at once."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Imports make no garbage; the collector finds none and takes a fifth of the start-up time.
    gc.disable()
    with _ending_with(options.sockets[0]):
        from moaic.runtime.worker import background, serve

        prepare = _nothing
        if may_compile(os.environ):
            prepare = _compiler(options.devices)
    # Freeze the imported objects: a worker's collector would copy the pages that all workers share.
    gc.freeze()
    requests, worker_end = background.request_sockets()
    pids: dict[int, int] = {}
    for index in range(len(options.sockets)):
        pid = _fork(lambda index=index: _start(serve.work, options, index, prepare, requests, worker_end))
        pids[pid] = options.first + index
    worker_end.close()
    mine = (options.memory, options.store, *options.peers, *options.listeners)
    for descriptor in (*mine, *options.sockets, *options.liveness_pipes):
        os.close(descriptor)
    for pid, rank in pids.items():
        _report(options.reports, rank, "pid", pid)
    _watch(pids, partial(_report, options.reports), requests, options.reports)
    os.killpg(0, signal.SIGKILL)


@contextlib.contextmanager
def _ending_with(program: int) -> Generator[None]:
    """End this process in the block soon after the program at the other end of a socket has ended.

    By a timer, as a process must not fork while it has a thread.
    """
    poll = select.poll()
    poll.register(program, 0)

    def look(number: int, frame: object) -> None:
        if poll.poll(0):
            os.killpg(0, signal.SIGKILL)

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, LOOK_SECONDS, LOOK_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _compiler(devices: Sequence[str]) -> Callable[[], None]:
    """Import the compiler; return the preparation that is left for the workers.

    With GPUs nothing is compiled here: compilation makes a CUDA context, and a process that has one must not fork.
    Headers are compiled by the first program that needs them, unless the first step waits for that.
    """
    from moaic.runtime.codegen.compile import import_compiler, precompile_headers, warm_compiler

    import_compiler()
    if any(device != CPU for device in devices):
        return _nothing
    warm_compiler()
    return precompile_headers if awaits_compiler(os.environ) else _nothing


def _nothing() -> None:
    pass


def _fork(work: Callable[[], None]) -> int:
    """Fork a process that does `work` and exits; return its pid."""
    with warnings.catch_warnings():
        # Python 3.12 warns of other threads. They are those of libraries for matrices, which are ready for a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _start(
    work: Callable[..., None],
    options: argparse.Namespace,
    index: int,
    prepare: Callable[[], None],
    requests: socket.socket,
    worker_end: socket.socket,
) -> None:
    """Turn a forked process into this host's worker `index`: its own process group, without descriptors of others."""
    gc.enable()
    os.setsid()
    requests.close()
    readers, writers = options.liveness_pipes[::2], options.liveness_pipes[1::2]
    for ends in (options.sockets, options.listeners, writers):
        for end in (end for other, end in enumerate(ends) if other != index):
            os.close(end)
    for descriptor in (options.reports, readers[index]):
        os.close(descriptor)
    others = [reader for other, reader in enumerate(readers) if other != index]
    settings = options.threads[index], options.devices[index], options.carrier, options.store
    links = (options.peers[0], options.listeners[index]) if options.peers else None
    me = options.first + index, options.ranks
    compiling = worker_end.detach()
    work(*me, options.sockets[index], options.memory, writers[index], others, links, *settings, compiling, prepare)


def _report(reports: int, rank: int, word: str, number: int) -> None:
    # A launcher that was killed reads no reports; its workers end by themselves.
    with contextlib.suppress(BrokenPipeError):
        os.write(reports, f"{rank} {word} {number}\n".encode("ascii"))


def _watch(pids: dict[int, int], report: Report, requests: socket.socket, reports: int) -> None:
    """Report each worker that is stopped, continues or ends, until all have ended; meanwhile fork compilers."""
    changes, wake_up = os.pipe()
    for end in (changes, wake_up):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake_up, warn_on_full_buffer=False)
    left = set(pids)
    waiting: list[int | socket.socket] = [changes, requests]
    while _report_changes(pids, left, report):
        ready, _, _ = select.select(waiting, [], [])
        if changes in ready:
            os.read(changes, WAKE_UPS)
        if requests in ready and not _fork_compiler(requests, changes, wake_up, reports):
            waiting.remove(requests)


def _report_changes(pids: dict[int, int], left: set[int], report: Report) -> bool:
    """Report all changes of children since the last call; return whether workers are left."""
    while left:
        pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
        if pid == 0:
            return True
        if pid not in left:
            continue
        if os.WIFSTOPPED(status):
            report(pids[pid], "stopped", os.WSTOPSIG(status))
        elif os.WIFCONTINUED(status):
            report(pids[pid], "continued", 0)
        else:
            report(pids[pid], "ended", os.waitstatus_to_exitcode(status))
            left.remove(pid)
    return False


def _fork_compiler(requests: socket.socket, *own: int) -> bool:
    """Fork a process for a job, without the descriptors that are the server's `own`; return whether there was one."""
    from moaic.runtime.worker import background

    if (job := background.receive_job(requests)) is None:
        return False

    def work() -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        requests.close()
        for descriptor in own:
            os.close(descriptor)
        gc.enable()
        background.run_job(job)

    # Where no process can be made, the worker compiles itself.
    with contextlib.suppress(OSError):
        _fork(work)
    job.close()
    return True


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="moaic.runtime.worker.fork_server", description="workers; started by a launcher"
    )
    for name in ("memory", "store", "reports", "first", "ranks"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("sockets", "liveness-pipes", "threads"):
        parser.add_argument(f"--{name}", type=int, nargs="+", required=True)
    for name in ("peers", "listeners"):
        parser.add_argument(f"--{name}", type=int, nargs="+", default=[])
    parser.add_argument("--devices", nargs="+", required=True)
    parser.add_argument("--carrier", required=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
