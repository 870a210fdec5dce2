"""Where process groups meet: a store of torch.distributed that all workers reach."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from typing import Any, Final

from torch import distributed

from moaic.runtime.comm.peer_links import DIAL_SECONDS, Unreachable
from moaic.runtime.protocol.peers import Peers

PATIENCE: Final = timedelta(days=1)
"""Timeout of the backends, never to be reached: when a worker is lost, the controller ends the others."""

Meet = Callable[[tuple[int, ...]], Any]
"""Gives the store of a group, by its ranks."""

_stores: Final[Any] = distributed


def meeting(descriptor: int, rank: int, peers: Peers | None) -> Meet:
    """The stores of this worker's groups: in a file that the workers of one host share, else served by the first rank.

    `descriptor` is that of the file, or for the first rank of several hosts that of a listening socket, which takes all
    who come: it is for networks that nobody else reaches.
    """
    store = cache(_whole(descriptor, rank, peers))
    return lambda ranks: _stores.PrefixStore(f"{ranks}", store())


def _whole(descriptor: int, rank: int, peers: Peers | None) -> Callable[[], Any]:
    """The store of all groups, once it is needed."""
    if peers is None:
        return partial(_of_file, descriptor)
    if rank:
        # Of the first rank's host all workers have it: while another one keeps it open, dials would wait for nobody.
        os.close(descriptor)
        return partial(_of_first_rank, peers)
    # Served from now on, as others may meet before this rank does.
    served = _patient(_tcp(peers, is_master=True, master_listen_fd=descriptor))
    return lambda: served


def _of_file(descriptor: int) -> Any:
    # A path through /proc opens the file anew: locks do not hold between workers that inherited one descriptor.
    return _patient(_stores.FileStore(f"/proc/self/fd/{descriptor}"))


def _of_first_rank(peers: Peers) -> Any:
    try:
        return _patient(_tcp(peers, timeout=timedelta(seconds=DIAL_SECONDS)))
    except RuntimeError as error:
        where = f"worker 0 at {peers.addresses[0].address}:{peers.store}"
        reason = str(error).partition("\n")[0]
        raise Unreachable(f"{where} cannot be reached: {reason}; firewalls must let workers connect") from error


def _tcp(peers: Peers, **settings: Any) -> Any:
    return _stores.TCPStore(peers.addresses[0].address, peers.store, wait_for_workers=False, **settings)


def _patient(store: Any) -> Any:
    store.set_timeout(PATIENCE)
    return store
