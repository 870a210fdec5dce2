"""A worker's process: receives messages, runs their commands, answers requests, and ends with its socket."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from moaic.ir.errors import Diagnostic
from moaic.runtime.comm.device_backend import DeviceBackend
from moaic.runtime.comm.peer_links import PeerLinks
from moaic.runtime.comm.process_group_transport import group_transport
from moaic.runtime.comm.rendezvous import meeting
from moaic.runtime.comm.shm_slots import SPINS, Mailbox
from moaic.runtime.comm.shm_transport import SharedMemoryTransport
from moaic.runtime.comm.staged_transport import StagedTransport
from moaic.runtime.comm.transport import Transport
from moaic.runtime.comm.two_level import TwoLevelTransport
from moaic.runtime.comm.worker_context import WorkerContext
from moaic.runtime.host.cores import cores
from moaic.runtime.host.gpus import CPU
from moaic.runtime.launch.addresses import LOOPBACK
from moaic.runtime.protocol.block_checks import check_commands
from moaic.runtime.protocol.carrier import Carrier
from moaic.runtime.protocol.commands import NO_REQUEST, AnswerCode, Command, Request, from_wire, is_request
from moaic.runtime.protocol.frames import Closed, Connection, Message, decode
from moaic.runtime.protocol.limits import Refused
from moaic.runtime.protocol.peers import Peers
from moaic.runtime.protocol.wire import tensors
from moaic.runtime.worker.background import BackgroundCompiler
from moaic.runtime.worker.device import backend_for
from moaic.runtime.worker.worker import Worker

BEAT_MILLISECONDS: Final = 1000

SWITCH_SECONDS: Final = 0.0002

MEMORY_ERRORS: Final = (MemoryError, RuntimeError)
"""Errors of PyTorch when an allocation fails."""


def work(
    rank: int,
    ranks: int,
    descriptor: int,
    memory: int,
    liveness_pipe: int,
    others: Sequence[int],
    far: tuple[int, int] | None,
    threads: int,
    device: str,
    carrier: str,
    store: int,
    compiling: int,
    prepare: Callable[[], None],
) -> None:
    """Worker main loop: returns or exits when the controller closes the socket `descriptor`.

    `liveness_pipe` closes when this process ends, which tells this host's other workers; `others` are the read ends of
    theirs. `far` are the descriptors of the file of `Peers` and of this worker's listener, if there are other hosts.
    `store` is the rendezvous of process groups, `compiling` the socket of `BackgroundCompiler`. `prepare` warms up the
    compiler on a thread, before the first program.
    """
    for inherited in (descriptor, memory, liveness_pipe, store, compiling, *others, *(far or ())):
        os.set_inheritable(inherited, False)
    spins = SPINS if len(others) < cores() else 0
    peers = None if far is None else _peers(far[0])
    links = None if far is None or peers is None else _links(rank, peers, far[1])
    mailbox = Mailbox(memory, rank, ranks, others, spins, links)
    backend = backend_for(device)
    threading.Thread(target=watch, args=(descriptor, mailbox, backend), name="watch", daemon=True).start()
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    connection = Connection(socket.socket(fileno=descriptor), tensors(backend.staging), check_commands)
    try:
        _begin(backend, connection)
        connection.send([NO_REQUEST, AnswerCode.HELLO, os.getpid()])
        threading.Thread(target=prepare, name="prepare", daemon=True).start()
        transport = _transport(Carrier(carrier), mailbox, store, peers, backend)
        background = BackgroundCompiler(compiling, rank, device, mailbox)
        context = WorkerContext(rank, backend, transport, mailbox.local)
        worker = Worker(context, mailbox, background, partial(_report, connection))
        serve(worker, mailbox, connection)
    except Closed:
        end()


def _peers(file: int) -> Peers:
    """Those in a file that several workers may read, which share its position."""
    peers = Peers.decoded(decode(os.pread(file, os.fstat(file).st_size, 0)))
    os.close(file)
    return peers


def _links(rank: int, peers: Peers, listener: int) -> PeerLinks:
    """The links to workers of other hosts."""
    # Threads that receive wait for the one that runs Python code; by default for 5 ms at a time.
    sys.setswitchinterval(SWITCH_SECONDS)
    return PeerLinks(rank, peers, socket.socket(fileno=listener))


def _begin(backend: DeviceBackend, connection: Connection[Tensor]) -> None:
    """Begin to use the device; if it cannot be used, say so and wait for the end."""
    try:
        backend.begin()
    except Diagnostic as reason:
        said = [-1, "starting", Diagnostic.__name__, reason.message, str(reason), False, None]
        connection.send([NO_REQUEST, AnswerCode.FAILED, *said])
        threading.Event().wait()


def watch(descriptor: int, mailbox: Mailbox, backend: DeviceBackend) -> None:
    """End this process when the other end of its socket closes, even while it computes; send heartbeats until then."""
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    last, spent = time.monotonic(), time.process_time()
    while not poll.poll(BEAT_MILLISECONDS):
        now, used = time.monotonic(), time.process_time()
        mailbox.beat(backend.device_bytes(), round(1000 * (used - spent) / max(now - last, 1e-3)), _resident_bytes())
        last, spent = now, used
    end()


def _resident_bytes() -> int:
    """Bytes of private and of shared memory of this process; 0 if they cannot be read, which must not end `watch`."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def end() -> None:
    """End this process at once, with all its children."""
    if os.getpid() == os.getpgrp():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _transport(
    carrier: Carrier, mailbox: Mailbox, store: int, peers: Peers | None, backend: DeviceBackend
) -> Transport:
    if carrier is Carrier.MEMORY:
        transport: Transport = SharedMemoryTransport(mailbox)
    else:
        address = LOOPBACK if peers is None else peers.addresses[mailbox.rank].address
        meet = meeting(store, mailbox.rank, peers)
        transport = group_transport(carrier, meet, address, mailbox.agree, backend)
    if peers is not None:
        transport = TwoLevelTransport(transport, mailbox.hosts)
    is_staged = carrier is Carrier.MEMORY and backend.compiled_for.type != CPU
    return StagedTransport(transport, backend) if is_staged else transport


def serve(worker: Worker, mailbox: Mailbox, connection: Connection[Tensor]) -> None:
    """Serve messages until the connection ends; after a fatal error only receive them. Raises Closed."""
    failure: list[Any] | None = None
    while True:
        try:
            message = connection.receive()
        except (Refused, *MEMORY_ERRORS) as error:
            # The rest of this message cannot be received, so no later one can be.
            _send_failure(worker.failure(error), mailbox, connection)
            raise Closed from error
        if failure is None:
            failure = _serve_message(worker, connection, message)
            if failure is not None:
                _send_failure(failure, mailbox, connection)


def _send_failure(failure: list[Any], mailbox: Mailbox, connection: Connection[Tensor]) -> None:
    mailbox.fail()
    connection.send([NO_REQUEST, AnswerCode.FAILED, *failure])


def _report(connection: Connection[Tensor], code: AnswerCode, data: list[Any]) -> None:
    connection.send([NO_REQUEST, code, *data])


def _serve_message(worker: Worker, connection: Connection[Tensor], message: Message[Tensor]) -> list[Any] | None:
    """Run a message's commands; return the failure after which the worker cannot continue, if there is one."""
    first, commands = message.body
    try:
        for number, data in enumerate(commands, first):
            command = from_wire(data)
            if is_request(command):
                _answer(worker, connection, command)
            else:
                _do(worker, number, command, message.blocks)
    except Closed:
        raise
    except BaseException as error:
        return worker.failure(error)
    worker.idle()
    return None


def _do(worker: Worker, number: int, command: Command, blocks: Sequence[Tensor | None]) -> None:
    """Run a command; if it fails, poison its results and continue. Raises fatal errors."""
    try:
        worker.do(number, command, blocks)
    except Exception as error:
        if not worker.survives(error):
            raise
        worker.give_up(error)


def _answer(worker: Worker, connection: Connection[Tensor], request: Request) -> None:
    try:
        answer = worker.answer(request)
    except Exception as error:
        if not worker.survives(error):
            raise
        connection.send([request.request, AnswerCode.POISONED, worker.failed(error)])
        return
    if answer is not None:
        data, block = answer
        kind = AnswerCode.DONE if block is None else AnswerCode.VALUE
        connection.send([request.request, kind, data], [block])
