"""Secrets that one user alone can read, on the nodes of one cluster: credentials of MUNGE, as Slurm uses them."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from shlex import join
from typing import Final

from moaic.ir.errors import Diagnostic

TYPE: Final = re.compile(r"^AuthType\s*=\s*auth/munge$", re.MULTILINE)

SOCKET: Final = re.compile(r"^AuthInfo\s*=.*\bsocket=([^,\s]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Munge:
    """The daemons of MUNGE on all nodes, which have a key in common."""

    socket: tuple[str, ...]
    """The option that names where the daemon listens, unless that is the usual place."""

    def seal(self, secret: str) -> str:
        """A credential, which is a line, from which `unseal` gets the secret back. Raises Diagnostic."""
        command = ["munge", f"--restrict-uid={os.getuid()}", *self.socket]
        try:
            done = subprocess.run(command, input=secret, capture_output=True, check=False, text=True)
        except OSError as error:
            raise Diagnostic(f"munge cannot be started: {error.strerror}", hint="install it: Slurm uses it") from None
        if done.returncode:
            raise Diagnostic(f"munge cannot protect the secret of the agents: {done.stderr.strip()}")
        return done.stdout.strip()

    @property
    def unseal(self) -> str:
        """The command of a shell that reads a credential and writes its secret, for this user."""
        # unmunge itself reads to the end, which comes when the agent's does.
        return f'read -r sealed; echo "$sealed" | {join(["unmunge", "--metadata=/dev/null", *self.socket])}'


def munge_of(configuration: str) -> Munge | None:
    """The MUNGE of a cluster by what `scontrol show config` says; None if Slurm knows users otherwise."""
    if not TYPE.search(configuration):
        return None
    found = SOCKET.search(configuration)
    return Munge((f"--socket={found[1]}",) if found else ())
