"""Lines of the log about the programs of workers."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from moaic.runtime.controller.loaded_programs import LoadedPrograms


def test_a_reason_for_not_capturing_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """As a pool tells it, of each program of a training."""
    buffers: Any = SimpleNamespace(pool=SimpleNamespace())
    LoadedPrograms(buffers)
    with caplog.at_level(logging.INFO, "moaic"):
        for reason in ("its sizes are open", "its sizes are open", "it reads what a forward has saved"):
            buffers.pool.not_captured(reason)
    assert caplog.messages == [
        "A program is not captured as a CUDA graph: its sizes are open.",
        "A program is not captured as a CUDA graph: it reads what a forward has saved.",
    ]
