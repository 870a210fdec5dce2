"""Compilation in the background: a process beside a worker compiles the worker's functions into the cache on disk.

A worker asks the fork server for the process, by a packet with two descriptors: a file that holds the job, and the end
of a pipe. The process writes what it compiled, and in how many seconds, into the pipe, which closes with the process.
It ends early when the worker, which reads the pipe, has ended.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch

from moaic.runtime.comm.shm_slots import Mailbox
from moaic.runtime.protocol.frames import decode, encode
from moaic.runtime.worker.compile_shares import compile_share
from moaic.runtime.worker.device import backend_for

PATIENCE_SECONDS: Final = 60.0
"""Time after which compilation begins although no program has run."""

PACKET: Final = b"compile"

DESCRIPTORS: Final = 2

Compiled = Callable[[Sequence[str], float], None]
"""Takes the names of functions and the seconds that compiling them together took."""


class BackgroundCompiler:
    """A worker's side: the programs that it is to compile, one after the other, on a thread that only waits."""

    def __init__(self, requests: int, rank: int, device: str, mailbox: Mailbox) -> None:
        """`requests` is the descriptor of the fork server's socket; `mailbox` counts the programs that are done."""
        self._socket: Final = socket.socket(fileno=requests)
        self._rank: Final = rank
        self._device: Final = device
        self._mailbox: Final = mailbox
        self._first_run: Final = threading.Event()
        self._jobs: Final = queue.SimpleQueue[tuple[str, Compiled | None]]()
        threading.Thread(target=self._work, name="background", daemon=True).start()

    def compile(self, text: str, done: Compiled | None) -> None:
        """Have this rank's share of a program compiled; `done` then gets the functions' names and the seconds.

        None is for a rank that has no share. A program is counted in any case: whether its functions are in the cache
        shows when they are looked up.
        """
        self._mailbox.begin_compiling()
        self._jobs.put((text, done))

    def ran(self) -> None:
        """A program has run: compilation, which would have delayed the first one, may begin."""
        self._first_run.set()

    def _work(self) -> None:
        while True:
            text, done = self._jobs.get()
            if not self._first_run.wait(PATIENCE_SECONDS):
                self._first_run.set()
            # There may be no fork server any more, and a process that was killed says nothing.
            with contextlib.suppress(OSError, ValueError):
                if done is not None and (answer := self._answer(text)):
                    done(*decode(answer))
            self._mailbox.finish_compiling()

    def _answer(self, text: str) -> bytes:
        job = encode([self._rank, self._mailbox.local, self._device, torch.get_num_threads(), text])
        reader, writer = os.pipe()
        with os.fdopen(reader, "rb") as answer:
            try:
                _send_job(self._socket, job, writer)
            finally:
                os.close(writer)
            return answer.read()


def _send_job(requests: socket.socket, job: bytes, writer: int) -> None:
    file = os.memfd_create("moaic-job", os.MFD_CLOEXEC)
    with os.fdopen(file, "w+b") as memory:
        memory.write(job)
        memory.flush()
        socket.send_fds(requests, [PACKET], [file, writer])


class CompileJob(NamedTuple):
    """The fork server's descriptors of a job: its file and its pipe."""

    file: int
    pipe: int

    def close(self) -> None:
        os.close(self.file)
        os.close(self.pipe)


def request_sockets() -> tuple[socket.socket, socket.socket]:
    """The fork server's end, and the one that all workers share."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def receive_job(requests: socket.socket) -> CompileJob | None:
    """The next job; None after the last worker has ended."""
    _, descriptors, _, _ = socket.recv_fds(requests, len(PACKET), DESCRIPTORS)
    return CompileJob(*descriptors) if len(descriptors) == DESCRIPTORS else None


def run_job(job: CompileJob) -> None:
    """Do a job, in a process of its own, and end the process with all its children."""
    os.setsid()
    _silence()
    threading.Thread(target=_end_with_worker, args=(job.pipe,), name="watch", daemon=True).start()
    with os.fdopen(job.file, "rb") as memory:
        memory.seek(0)
        rank, local, device, threads, text = decode(memory.read())
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    start = time.perf_counter()
    # The worker finds the same error when it compiles what is not in the cache, and reports it.
    with contextlib.suppress(Exception):
        backend = backend_for(device)
        backend.begin()
        names = compile_share(text, rank, local, backend.compiled_for)
        os.write(job.pipe, encode([names, time.perf_counter() - start]))
    os.killpg(0, signal.SIGKILL)


def _silence() -> None:
    """Drop what this process writes: the compiler logs an error before it raises it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)


def _end_with_worker(pipe: int) -> None:
    poll = select.poll()
    poll.register(pipe, 0)
    poll.poll()
    os.killpg(0, signal.SIGKILL)
