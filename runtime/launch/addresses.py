"""Addresses of hosts, as this one sees them."""

from __future__ import annotations

import socket
from typing import Final

from moaic.ir.errors import Diagnostic
from moaic.runtime.host.flavors import HostShare

LOOPBACK: Final = "127.0.0.1"
"""Where no other host reaches anything."""

ANY_PORT: Final = 9
"""Nothing is sent there: the system only says from which address it would be."""


def facing(address: str) -> str:
    """The address of this host from which another one is reached. Raises Diagnostic."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, ANY_PORT))
        except OSError as error:
            raise Diagnostic(
                f"no network of this host leads to {address}: {error.strerror or error}",
                hint="set address of the [[host]], or listen of [cluster], in cluster.toml",
            ) from None
        return str(probe.getsockname()[0])


def with_number(share: HostShare) -> HostShare:
    """The host with the number of its address: its own name may mean something else there. Raises Diagnostic."""
    try:
        address = str(socket.getaddrinfo(share.address, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise Diagnostic(
            f"the address `{share.address}` of host `{share.name}` cannot be found: {error.strerror or error}",
            hint="set address of this [[host]] in cluster.toml",
        ) from None
    return share._replace(address=address)
