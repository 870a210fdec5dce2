"""The handler of moaic's log: lines such as `[info] …` on standard error, from the level of MOAI_LOG on."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

from moaic.ir.errors import Diagnostic
from moaic.support.progress import CLEAR

LEVELS: Mapping[str, int] = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}


class LineFormatter(logging.Handler):
    """Writes to the current standard error; silent where the user's program has configured logging itself."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            over = CLEAR if sys.stderr.isatty() else ""
            sys.stderr.write(f"{over}[{record.levelname.lower()}] {record.getMessage()}\n")


def install(environment: Mapping[str, str]) -> None:
    """Gives the logger `moaic` its handler and the level of MOAI_LOG (`info` if unset). Raises Diagnostic.

    Called when moaic is used, not when it is imported, and may be called again. A level that the user's program has set
    stays unless MOAI_LOG is set.
    """
    name = environment.get("MOAI_LOG", "info").lower()
    if name not in LEVELS:
        raise Diagnostic(f"MOAI_LOG={name} is not a level", hint=f"choose one of {', '.join(LEVELS)}")
    logger = logging.getLogger("moaic")
    if not any(isinstance(handler, LineFormatter) for handler in logger.handlers):
        logger.addHandler(LineFormatter())
    if logger.level == logging.NOTSET or "MOAI_LOG" in environment:
        logger.setLevel(LEVELS[name])
