"""Where the workers of a host come from: a process that loads the libraries once and forks a worker for each device.

`python -m moaic.runtime.worker.fork_server` is started by a launcher with the descriptors that the workers need. It
has one thread and has touched no device when it forks. Then it says on a pipe what becomes of the workers, and ends
with the last one.
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
    # Nothing of all that is made here is garbage, and to find that out again and again takes a fifth of the time.
    gc.disable()
    from moaic.runtime.worker import serve

    prepare = _nothing
    if may_compile(os.environ):
        prepare = _compiler(options.devices)
    # What is here now is for good: no worker's collector has to touch these pages, which all of them share.
    gc.freeze()
    ranks = range(len(options.sockets))
    pids = {_fork(lambda rank=rank: _start(serve.work, options, rank, prepare)): rank for rank in ranks}
    for descriptor in (options.memory, options.store, *options.sockets, *options.lifelines):
        os.close(descriptor)
    with os.fdopen(options.reports, "w", buffering=1, encoding="ascii") as reports:
        for pid, rank in pids.items():
            reports.write(f"{rank} pid {pid}\n")
        _watch(pids, lambda rank, word, number: reports.write(f"{rank} {word} {number}\n"))
    os.killpg(0, signal.SIGKILL)


def _compiler(devices: Sequence[str]) -> Callable[[], None]:
    """Loads what compiling needs; what is left to be done by the workers themselves.

    Where there are GPUs nothing is compiled here: that would look at them, and who has done so must not fork.
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
    """The id of a new process that does the work and ends."""
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
    """Becomes a worker: in a process group of its own, without what belongs to the others."""
    gc.enable()
    os.setsid()
    readers, writers = options.lifelines[::2], options.lifelines[1::2]
    others = [socket for peer, socket in enumerate(options.sockets) if peer != rank]
    others += [writer for peer, writer in enumerate(writers) if peer != rank]
    for descriptor in (options.reports, readers[rank], *others):
        os.close(descriptor)
    peers = [reader for peer, reader in enumerate(readers) if peer != rank]
    means = options.threads[rank], options.devices[rank], options.carrier, options.store
    work(rank, options.sockets[rank], options.memory, writers[rank], peers, *means, prepare)


def _watch(pids: dict[int, int], report: Callable[[int, str, int], object]) -> None:
    """Reports of each worker that it was stopped or goes on, until all have ended."""
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
    for name in ("sockets", "lifelines", "threads"):
        parser.add_argument(f"--{name}", type=int, nargs="+", required=True)
    parser.add_argument("--devices", nargs="+", required=True)
    parser.add_argument("--carrier", required=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
