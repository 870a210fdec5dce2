"""One of two processes that add up 64 MiB over a network: by the links of moaic, or by gloo. Run by `two_hosts.py`.

Arguments: `links` or `gloo`, the rank, the addresses of both, a file with the encoded `Peers` of this rank.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from moaic.runtime.comm.peer_links import PeerLinks
from moaic.runtime.comm.shm_slots import Mailbox
from moaic.runtime.comm.shm_transport import SharedMemoryTransport
from moaic.runtime.comm.transport import Group
from moaic.runtime.protocol.frames import decode
from moaic.runtime.protocol.peers import Peers
from moaic.runtime.protocol.shared_memory import create_memory

SIZES = (32 << 10, 64 << 20)

ROUNDS = 9


def by_links(rank: int, file: str) -> Callable[[Tensor], None]:
    peers = Peers.decoded(decode(Path(file).read_bytes()))
    listener = socket.create_server((peers.addresses[rank].address, peers.addresses[rank].port))
    mailbox = Mailbox(create_memory(2), rank, 2, (), links=PeerLinks(rank, peers, listener))
    # Both listen before one dials.
    sys.stdout.write("listening\n")
    sys.stdout.flush()
    sys.stdin.readline()
    transport, group = SharedMemoryTransport(mailbox), Group.of((0, 1), rank)
    return lambda tensor: transport.all_reduce(tensor, group)


def by_gloo(rank: int, address: str, mine: str) -> Callable[[Tensor], None]:
    os.environ["GLOO_SOCKET_IFNAME"] = mine
    distributed.init_process_group("gloo", init_method=f"tcp://{address}:29500", rank=rank, world_size=2)
    gloo: Any = distributed
    return gloo.all_reduce


def main(kind: str, rank: int, address: str, third: str) -> None:
    torch.set_num_threads(1)
    sys.setswitchinterval(0.0002)
    add = by_links(rank, third) if kind == "links" else by_gloo(rank, address, third)
    for size in SIZES:
        tensor, seconds = torch.ones(size // 4), list[float]()
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            add(tensor)
            seconds.append(time.perf_counter() - begin)
        if rank == 0:
            sys.stdout.write(f"{size} {statistics.median(seconds[2:])}\n")
            sys.stdout.flush()
    # The other one may still be receiving.
    time.sleep(1)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
