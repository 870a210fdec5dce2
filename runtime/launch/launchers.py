"""What starts the agents of other hosts: the user, or ssh. Neither takes part in what follows."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from shlex import join
from typing import BinaryIO, Final

from moaic.ir.errors import Diagnostic
from moaic.runtime.host.cluster_settings import ClusterSettings, Launcher
from moaic.runtime.host.flavors import HostShare
from moaic.runtime.launch.enrolment import new_token

SSH: Final = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
"""Asks nothing: nobody could answer."""

SAID: Final = 2000
"""Characters kept of what a command has said."""

LEAST_CHARACTERS: Final = 32
"""Of a secret that a user chooses: what can be guessed is none."""

Say = Callable[[str], None]


def secrets_of(launcher: Launcher, hosts: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """What each host proves itself by: a secret of its own, or the user's, where the user starts agents.

    Raises Diagnostic if the user has given none.
    """
    if launcher is not Launcher.CONNECT:
        return {host: new_token() for host in hosts}
    secret = environment.get("MOAI_TOKEN", "")
    if len(secret) < LEAST_CHARACTERS:
        raise Diagnostic(
            "agents that connect need a secret that they share with this program: MOAI_TOKEN, of at least "
            f"{LEAST_CHARACTERS} characters",
            hint="export MOAI_TOKEN=$(openssl rand -hex 32), here and where agents are started",
        )
    return dict.fromkeys(hosts, secret)


class Agents:
    """The agents that have been asked for, and the processes here through which they run, if there are any."""

    def __init__(self, settings: ClusterSettings, address: tuple[str, int]) -> None:
        self._settings = settings
        self._address = address
        self._processes: dict[str, tuple[subprocess.Popen[bytes], BinaryIO]] = {}
        """By host, with what each has said."""

    def command(self, share: HostShare) -> str:
        """The command that starts the agent of a host, there."""
        where = f"{self._address[0]}:{self._address[1]}"
        return f"{self._settings.command} agent --connect {where} --host {join([share.name])}"

    def start_all(self, shares: Sequence[HostShare], secrets: Mapping[str, str], say: Say) -> None:
        """Start the agents of all hosts, or say how the user does. Raises Diagnostic."""
        for share in shares:
            if self._settings.launcher is Launcher.SSH:
                self.start(share, secrets[share.name])
            else:
                command = self.command(share)
                say(f"Waiting for host {share.name}. Run there, with MOAI_TOKEN as it is here: {command}")

    def start(self, share: HostShare, secret: str) -> None:
        """Start the agent of a host by ssh; the secret goes through its standard input. Raises Diagnostic."""
        said = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        try:
            process = subprocess.Popen(
                [*SSH, share.address, self.command(share)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=said,
                start_new_session=True,
            )
        except OSError as error:
            raise Diagnostic(f"ssh cannot be started: {error.strerror}", hint="install it, or connect agents") from None
        self._processes[share.name] = process, said
        assert process.stdin is not None
        # What has ended before it has read says why on its standard error.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(f"{secret}\n".encode())
            process.stdin.flush()

    def check(self) -> None:
        """Raises Diagnostic for an agent whose process has ended."""
        for host, (process, said) in self._processes.items():
            if process.poll() is not None:
                said.seek(0)
                words = said.read().decode(errors="replace")[-SAID:].strip() or f"exit code {process.returncode}"
                raise Diagnostic(f"the agent of host `{host}` could not be started by ssh: {words}")

    def end(self, seconds: float) -> None:
        """Wait until the processes have ended, then end those that have not."""
        until = time.monotonic() + seconds
        for process, said in self._processes.values():
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            said.close()
