"""The look of log lines, and the level that MOAI_LOG asks for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from moaic.ir.errors import Diagnostic
from moaic.support.logging_setup import install


def test_log_lines_look_as_asked_for() -> None:
    code = """
import logging, sys
from moaic.support.logging_setup import install
install({"MOAI_LOG": sys.argv[1]} if sys.argv[1:] else {})
install({"MOAI_LOG": sys.argv[1]} if sys.argv[1:] else {})
logger = logging.getLogger("moaic")
logger.debug("small"); logger.info("The number of candidates is %d.", 3); logger.warning("large")
"""

    def said(*arguments: str) -> list[str]:
        ended = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        return ended.stderr.splitlines()

    assert said() == ["[info] The number of candidates is 3.", "[warning] large"]
    assert said("warning") == ["[warning] large"]
    assert said("debug")[0] == "[debug] small"


def test_a_level_that_is_none_is_refused() -> None:
    with pytest.raises(Diagnostic, match="MOAI_LOG=loud is not a level"):
        install({"MOAI_LOG": "loud"})
