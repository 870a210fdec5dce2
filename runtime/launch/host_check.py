"""What `moaic cluster check` asks of a host, answered there, before there are workers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moaic.ir.errors import Diagnostic
from moaic.runtime.host.cpp_compiler import compiler_path, python_header
from moaic.runtime.host.gpus import usable
from moaic.runtime.host.memory import host_bytes
from moaic.runtime.launch.identity import Credentials
from moaic.runtime.launch.link_probe import LinkProbe
from moaic.runtime.launch.listening import listen
from moaic.runtime.protocol.frames import Connection
from moaic.runtime.protocol.host_messages import FolderState, HostCode, HostState, MeasuredLink
from moaic.runtime.protocol.limits import Refused
from moaic.runtime.protocol.peers import PeerAddress


class CheckedHost:
    """This host as one of those that are checked."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._probe: LinkProbe | None = None

    def state(self, marker: str, address: str) -> HostState:
        """What is here; links of other hosts are accepted from now on.

        `marker` is a file that the program has made in a folder which all hosts should see.
        """
        port, words = 0, ""
        try:
            self._probe = LinkProbe(listen(address, 1)[0], self._credentials)
            port = self._probe.port
        except Diagnostic as error:
            words = error.message
        has_header = python_header().exists()
        memory = host_bytes(), tuple(gpu.memory for gpu in usable(os.environ))
        return HostState(*memory, compiler_path(os.environ) or "", has_header, _folder(marker), port, words)

    def measure(self, to: PeerAddress) -> MeasuredLink:
        """How this host reaches another one. Raises Refused before `state` was asked."""
        if self._probe is None:
            raise Refused("a measurement of a host that does not listen")
        return self._probe.measure(to)

    def close(self) -> None:
        if self._probe is not None:
            self._probe.close()


def answer_check(connection: Connection[bytearray], credentials: Credentials) -> Sequence[Any]:
    """Answer the questions of a check; the first message that is none. Raises Closed and Refused."""
    host = CheckedHost(credentials)
    try:
        while True:
            match connection.receive().body:
                case [HostCode.CHECK, marker, address]:
                    connection.send([HostCode.CHECKED, host.state(marker, address).encoded()])
                case [HostCode.MEASURE, address, port, name]:
                    connection.send([HostCode.MEASURED, host.measure(PeerAddress(address, port, name)).encoded()])
                case body:
                    return body
    finally:
        host.close()


def _folder(marker: str) -> FolderState:
    path = Path(marker)
    if not path.exists():
        return FolderState.APART
    return FolderState.SHARED if os.access(path.parent, os.W_OK | os.X_OK) else FolderState.READ_ONLY
