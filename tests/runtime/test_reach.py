"""The ways from the network to a worker, as SECURITY.md states them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moaic.runtime.controller.accelerator import Accelerator
from moaic.runtime.controller.launch import launch
from moaic.runtime.protocol.carrier import Carrier
from moaic.tools.usage import is_worker
from tests.runtime.worker.test_program import SUMS, run

LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}
"""127.0.0.1, as /proc/net prints it for either version of IP."""


def workers() -> set[int]:
    """Of this process: those that compute, and those that these were forked from."""
    return {pid for pid in children(os.getpid()) if is_worker(pid)}


def children(pid: int) -> Iterator[int]:
    """The processes that `pid` started, and theirs."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            yield child
            yield from children(child)


def addresses(pid: int) -> set[str]:
    """The local addresses of the sockets of IP that a process has open."""
    links = {str(link) for descriptor in Path(f"/proc/{pid}/fd").iterdir() if (link := target(descriptor))}
    rows = [
        line.split()
        for table in ("tcp", "tcp6", "udp", "udp6")
        if (file := Path(f"/proc/{pid}/net/{table}")).exists()
        for line in file.read_text().splitlines()[1:]
    ]
    return {row[1].partition(":")[0] for row in rows if f"socket:[{row[9]}]" in links}


def target(link: Path) -> Path | None:
    try:
        return link.readlink()
    except FileNotFoundError:  # closed by now
        return None


@pytest.mark.parametrize(("carrier", "found"), [(Carrier.MEMORY, set[str]()), (Carrier.GLOO, LOOPBACK)])
def test_workers_of_cpus_open_no_port_and_those_that_share_a_gpu_only_local_ones(
    carrier: Carrier, found: set[str]
) -> None:
    others = workers()
    accelerator = Accelerator(launch(2, {"MOAI_COMPILE": "0"}, carrier=carrier))
    try:
        run(accelerator, SUMS.format(mesh="a=2", dtype="f32", n=8), torch.ones(8, 8))
        ours = workers() - others
        assert len(ours) == 3
        opened = set[str]().union(*map(addresses, ours))
    finally:
        accelerator.close()
    assert opened <= found
    assert bool(opened) == bool(found)
