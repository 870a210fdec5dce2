"""Where moaic's log goes: lines like `[info] …` on standard error, as many as MOAI_LOG wants."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

from moaic.ir.errors import Diagnostic
from moaic.support.progress import CLEAR

LEVELS: Mapping[str, int] = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}


class LineFormatter(logging.Handler):
    """Writes to whatever standard error is at the time; silent where the person's program has handlers of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            over = CLEAR if sys.stderr.isatty() else ""
            sys.stderr.write(f"{over}[{record.levelname.lower()}] {record.getMessage()}\n")


def install(environment: Mapping[str, str]) -> None:
    """Makes the logger `moaic` speak, at the level that MOAI_LOG names (`info` if unset). Raises Diagnostic.

    To be called when moaic is used, not when it is imported. May be called again. A level that the person's program has
    set stays.
    """
    name = environment.get("MOAI_LOG", "info").lower()
    if name not in LEVELS:
        raise Diagnostic(f"MOAI_LOG={name} is not a level", hint=f"choose one of {', '.join(LEVELS)}")
    logger = logging.getLogger("moaic")
    if not any(isinstance(handler, LineFormatter) for handler in logger.handlers):
        logger.addHandler(LineFormatter())
    if logger.level == logging.NOTSET or "MOAI_LOG" in environment:
        logger.setLevel(LEVELS[name])
