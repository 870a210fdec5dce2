"""Log lines of the start of the workers. Scripts read them, so their form is fixed; logging delays nothing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from moaic.runtime.controller.accelerator import Accelerator
from moaic.runtime.host.version import VERSION

LOGGER = logging.getLogger("moaic")


def requesting() -> None:
    LOGGER.info("Requesting resources for MoAI Accelerator from the server...")


def initializing() -> None:
    LOGGER.info("Initializing the worker daemon for MoAI Accelerator")


def shared_with(job: int, command: str, pid: int, accelerator: int) -> None:
    LOGGER.info(
        "Accelerator %d is also used by job %d (%s, pid %d): both share its cores and its memory. "
        "`moai-smi device --add` gives you another accelerator, MOAI_ACCELERATOR=N selects it.",
        accelerator,
        job,
        command,
        pid,
    )


def without_effect(variable: str, value: str) -> None:
    LOGGER.warning(
        "%s=%s has no effect on the MoAI Accelerator: its flavor says how many workers it has. "
        "`moai-switch-model` shows and switches flavors.",
        variable,
        value,
    )


def interpreted(gpu: str, target: str) -> None:
    LOGGER.info("Workers interpret the kernels of an %s (%s) on this machine: slow, for proofs.", gpu, target)


def about_hosts(text: str) -> None:
    LOGGER.warning("%s", text)


def untracked(reason: object) -> None:
    LOGGER.info("moai-smi will not show this program: %s", reason)


def follow(accelerator: Accelerator, job: int | None, ready: Callable[[list[int]], None]) -> None:
    """Log each worker that connects, on a thread of its own; call `ready` with all pids at the end."""
    greetings = Greetings(accelerator.hosts, job, ready)
    threading.Thread(target=accelerator.welcome, args=(greetings.heard,), name="startup", daemon=True).start()


class Greetings:
    """Counts the workers that have sent HELLO, and logs each."""

    def __init__(self, hosts: Sequence[str], job: int | None, ready: Callable[[list[int]], None]) -> None:
        """`hosts` are the names of the workers' hosts, empty for this one."""
        self._hosts = [host or "localhost" for host in hosts]
        self._pids = [0] * len(hosts)
        self._job = job
        self._ready = ready

    def heard(self, rank: int, pid: int) -> None:
        self._pids[rank] = pid
        count, size = sum(map(bool, self._pids)), len(self._pids)
        LOGGER.info(
            "[%d/%d] Connecting to resources on the server (%s, process %d)...", count, size, self._hosts[rank], pid
        )
        if count < size:
            return
        LOGGER.info("Establishing links to the resources...")
        self._ready(self._pids)
        LOGGER.info("MoAI Accelerator is ready to use.")
        LOGGER.info("Moai Version: %s", VERSION)
        if self._job is not None:
            LOGGER.info("Moai Job ID: %d", self._job)
