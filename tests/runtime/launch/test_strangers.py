"""Strangers of every kind at the port of a controller: each is refused soon, and hosts of the job still come in."""

from __future__ import annotations

import socket
import threading
import time
import tracemalloc
from contextlib import suppress
from typing import Any

import pytest

from moaic.runtime.launch.enrolment import agent_proof, dial, enrol
from moaic.runtime.launch.identity import client_context, request_certificate
from tests.runtime.launch.test_enrolment import Job, below, fingerprint, stranger
from tests.runtime.mutations import Mutator, hangs_up, hello

MOST_BYTES = 128 << 20

_, CSR = request_certificate()


def speak(mutator: Mutator, job: Job, first: bytes) -> socket.socket:
    """Say something: most fail in the handshake, some ask for a certificate, some break the encryption."""
    kind = mutator.random.randrange(8)
    if kind > 1:
        sock = socket.create_connection(job.address)
        with suppress(OSError):
            sock.sendall(mutator.bytes(first))
        return sock
    stream = stranger(job.address)
    with suppress(OSError):
        if kind:
            below(stream).sendall(mutator.bytes(b"\x17\x03\x03\x00\x20" + bytes(32)))
        else:
            request: list[Any] = ["a", CSR, agent_proof(job.tokens["a"], "a", CSR, fingerprint(stream))]
            stream.sendmsg([memoryview(mutator.stream([(request, [b"block"]), (request, [])]))])
    return below(stream)


def fuzz(seed: int, strangers: int) -> None:
    mutator, job, first = Mutator(seed), Job(), hello(client_context(None))
    before = threading.active_count()
    tracemalloc.start()
    for _ in range(strangers):
        assert hangs_up(speak(mutator, job, first))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MOST_BYTES, f"{peak:,} bytes"
    until = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() <= before
    dial(job.address, enrol(job.address, "b", job.tokens["b"], 5), 5).close()
    assert job.next_host() == "b"
    assert job.refusals.qsize() > strangers / 2
    job.close()


@pytest.mark.timeout(60)
def test_strangers_are_refused() -> None:
    fuzz(seed=0, strangers=600)


@pytest.mark.exact
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 11))
def test_many_strangers_are_refused(seed: int) -> None:
    fuzz(seed, strangers=20_000)
