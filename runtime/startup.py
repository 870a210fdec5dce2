"""What is said while the workers start, line by line in a form that people know; nothing waits for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from moaic.runtime.accelerator import Accelerator
from moaic.runtime.version import VERSION

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


def untracked(reason: object) -> None:
    LOGGER.info("moai-smi will not show this program: %s", reason)


def follow(accelerator: Accelerator, job: int | None, ready: Callable[[list[int]], None]) -> None:
    """Says in a thread of its own which workers connect, as they do; `ready` gets their processes in the end."""
    threading.Thread(target=_follow, args=(accelerator, job, ready), name="startup", daemon=True).start()


def _follow(accelerator: Accelerator, job: int | None, ready: Callable[[list[int]], None]) -> None:
    pids = [0] * accelerator.flavor
    for count, (rank, pid) in enumerate(accelerator.greetings(), 1):
        pids[rank] = pid
        LOGGER.info("[%d/%d] Connecting to resources on the server (localhost, process %d)...", count, len(pids), pid)
    if not all(pids):
        return
    LOGGER.info("Establishing links to the resources...")
    ready(pids)
    LOGGER.info("MoAI Accelerator is ready to use.")
    LOGGER.info("Moai Version: %s", VERSION)
    if job is not None:
        LOGGER.info("Moai Job ID: %d", job)
