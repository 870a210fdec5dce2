"""Log lines about programs that are compiled in the background."""

from __future__ import annotations

import logging

from moaic.text.units import count

LOGGER = logging.getLogger("moaic")


def compiled(functions: int, seconds: float, runs: int) -> None:
    LOGGER.info(
        "A program is compiled now: %s in the background, %.1f s after it was loaded and after %s op by op.",
        count(functions, "function"),
        seconds,
        count(runs, "run"),
    )


def not_captured(reason: str) -> None:
    LOGGER.info("A program is not captured as a CUDA graph: %s.", reason)


def not_compiled(reason: str, host: str) -> None:
    LOGGER.warning(
        "A program runs op by op, as its functions could not be compiled%s: %s. MOAI_COMPILE=wait shows the error.",
        f" on {host}" if host else "",
        reason,
    )
