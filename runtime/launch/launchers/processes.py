"""Processes of this host through which agents of other hosts run, and what each has said."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import BinaryIO, Final

from moaic.ir.errors import Diagnostic

SAID: Final = 2000
"""Bytes at the end of what a process has said that are shown."""


class Processes:
    """The processes of one launcher, by the host whose agent runs through them, or by another name."""

    def __init__(self, launcher: str) -> None:
        self._launcher = launcher
        self._processes: dict[str, tuple[subprocess.Popen[bytes], BinaryIO]] = {}

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        answers: bool = False,
    ) -> subprocess.Popen[bytes]:
        """Start a process with a pipe as standard input, and with `answers` one as standard output.

        Raises Diagnostic if there is no such command.
        """
        said = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        try:
            process = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if answers else subprocess.DEVNULL,
                stderr=said,
                start_new_session=True,
                env=environment,
            )
        except OSError as error:
            said.close()
            raise Diagnostic(
                f"{self._launcher} cannot be started: {error.strerror}", hint="install it, or connect agents"
            ) from None
        self._processes[name] = process, said
        return process

    def said(self, name: str) -> str:
        """The end of what a process has written to its standard error."""
        descriptor = self._processes[name][1].fileno()
        # The process writes where the file's position is: it must not move.
        begin = max(0, os.fstat(descriptor).st_size - SAID)
        return os.pread(descriptor, SAID, begin).decode(errors="replace").strip()

    def ended(self) -> dict[str, str]:
        """What those have said, or their exit codes, that have ended."""
        ended = {name: each.returncode for name, (each, _) in self._processes.items() if each.poll() is not None}
        return {name: self.said(name) or _in_words(code) for name, code in ended.items()}

    def end(self, seconds: float) -> None:
        """Wait until the processes have ended, then kill those that have not."""
        until = time.monotonic() + seconds
        for process, said in self._processes.values():
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for pipe in (process.stdin, process.stdout, said):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()


def write_line(process: subprocess.Popen[bytes], line: str) -> None:
    """Give a process a line of standard input; one that has ended says why on its standard error."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(f"{line}\n".encode())


def _in_words(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"it was killed by {signal.Signals(-code).name}"
