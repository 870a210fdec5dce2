"""The fork server of a host: a process that imports the libraries once and forks one worker per device.

The launcher starts `python -m moaic.runtime.worker.fork_server` with the descriptors that the workers need. The server
has one thread and no device context when it forks. It then reports on a pipe when workers are stopped, continue or end,
and ends after the last one.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import traceback
from collections.abc import Callable, Sequence

from moaic.runtime.host.env_flags import may_compile
from moaic.runtime.host.gpus import CPU


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Imports make no garbage; the collector finds none and takes a fifth of the start-up time.
    gc.disable()
    from moaic.runtime.worker import serve

    prepare = _nothing
    if may_compile(os.environ):
        prepare = _compiler(options.devices)
    # Freeze the imported objects: a worker's collector would copy the pages that all workers share.
    gc.freeze()
    ranks = range(len(options.sockets))
    pids = {_fork(lambda rank=rank: _start(serve.work, options, rank, prepare)): rank for rank in ranks}
    for descriptor in (options.memory, options.store, *options.sockets, *options.liveness_pipes):
        os.close(descriptor)
    with os.fdopen(options.reports, "w", buffering=1, encoding="ascii") as reports:
        for pid, rank in pids.items():
            reports.write(f"{rank} pid {pid}\n")
        _watch(pids, lambda rank, word, number: reports.write(f"{rank} {word} {number}\n"))
    os.killpg(0, signal.SIGKILL)


def _compiler(devices: Sequence[str]) -> Callable[[], None]:
    """Import the compiler; return the preparation that is left for the workers.

    With GPUs nothing is compiled here: compilation makes a CUDA context, and a process that has one must not fork.
    """
    from moaic.runtime.codegen.compile import import_compiler, precompile_headers, warm_compiler

    import_compiler()
    if any(device != CPU for device in devices):
        return _nothing
    warm_compiler()
    return precompile_headers


def _nothing() -> None:
    pass


def _fork(work: Callable[[], None]) -> int:
    """Fork a process that does `work` and exits; return its pid."""
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


def _start(work: Callable[..., None], options: argparse.Namespace, rank: int, prepare: Callable[[], None]) -> None:
    """Turn a forked process into a worker: its own process group, without the descriptors of other workers."""
    gc.enable()
    os.setsid()
    readers, writers = options.liveness_pipes[::2], options.liveness_pipes[1::2]
    others = [socket for peer, socket in enumerate(options.sockets) if peer != rank]
    others += [writer for peer, writer in enumerate(writers) if peer != rank]
    for descriptor in (options.reports, readers[rank], *others):
        os.close(descriptor)
    peers = [reader for peer, reader in enumerate(readers) if peer != rank]
    settings = options.threads[rank], options.devices[rank], options.carrier, options.store
    work(rank, options.sockets[rank], options.memory, writers[rank], peers, *settings, prepare)


def _watch(pids: dict[int, int], report: Callable[[int, str, int], object]) -> None:
    """Report each worker that is stopped, continues or ends, until all have ended."""
    left = set(pids)
    while left:
        pid, status = os.waitpid(-1, os.WUNTRACED | os.WCONTINUED)
        if pid not in left:
            continue
        if os.WIFSTOPPED(status):
            report(pids[pid], "stopped", os.WSTOPSIG(status))
        elif os.WIFCONTINUED(status):
            report(pids[pid], "continued", 0)
        else:
            report(pids[pid], "ended", os.waitstatus_to_exitcode(status))
            left.remove(pid)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="moaic.runtime.worker.fork_server", description="workers; started by a launcher"
    )
    for name in ("memory", "store", "reports"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("sockets", "liveness-pipes", "threads"):
        parser.add_argument(f"--{name}", type=int, nargs="+", required=True)
    parser.add_argument("--devices", nargs="+", required=True)
    parser.add_argument("--carrier", required=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
