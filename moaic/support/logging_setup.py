"""The handler of moaic's log: lines such as `[info] …` on standard error, from the level of MOAI_LOG on."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Final

from moaic.ir.errors import Diagnostic
from moaic.support.progress import CLEAR

LOG_VARIABLE: Final = "MOAI_LOG"

LEVELS: Final[Mapping[str, int]] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
    "off": logging.CRITICAL + 1,
}

OTHER_NAMES: Final[Mapping[str, str]] = {"warn": "warning", "fatal": "critical", "none": "off", "quiet": "off"}


class LineFormatter(logging.Handler):
    """Writes to the current standard error; silent where the user's program has configured logging itself."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            over = CLEAR if sys.stderr.isatty() else ""
            sys.stderr.write(f"{over}[{record.levelname.lower()}] {record.getMessage()}\n")


def level_of(word: str) -> int:
    """The level that a value of MOAI_LOG names. Raises Diagnostic."""
    name = OTHER_NAMES.get(word.lower(), word.lower())
    if name not in LEVELS:
        raise Diagnostic(f"{LOG_VARIABLE}={word} is not a level", hint=f"choose one of {', '.join(LEVELS)}")
    return LEVELS[name]


def install(environment: Mapping[str, str]) -> None:
    """Gives the logger `moaic` its handler and the level of MOAI_LOG (`info` if unset). Raises Diagnostic.

    Called when moaic is used, not when it is imported, and may be called again. A level that the user's program has set
    stays unless MOAI_LOG is set.
    """
    level = level_of(environment.get(LOG_VARIABLE) or "info")
    logger = logging.getLogger("moaic")
    if not any(isinstance(handler, LineFormatter) for handler in logger.handlers):
        logger.addHandler(LineFormatter())
    if logger.level == logging.NOTSET or LOG_VARIABLE in environment:
        logger.setLevel(level)
