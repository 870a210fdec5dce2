"""Without a terminal there is a log line now and then about work that goes on."""

from __future__ import annotations

import logging
import time

import pytest

from moaic.runtime.protocol.commands import CODES, Load, Run
from moaic.support import progress


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(progress, "SIGN_SECONDS", 0.05)
    monkeypatch.setattr(progress, "is_visible", lambda: False)
    caplog.set_level(logging.INFO, "moaic")
    return caplog


def test_a_long_block_says_so_until_it_ends(soon: pytest.LogCaptureFixture) -> None:
    with progress.shown("Planning") as line:
        assert line is None
        time.sleep(0.3)
    said = [text for text in soon.messages if text.startswith("Planning for ")]
    assert len(said) >= 2
    time.sleep(0.2)
    assert [text for text in soon.messages if text.startswith("Planning for ")] == said


def test_a_long_wait_for_workers_says_what_they_do(soon: pytest.LogCaptureFixture) -> None:
    waits = progress.Waits()
    waits([CODES[Load], CODES[Run]])
    assert not soon.messages
    time.sleep(0.1)
    waits([CODES[Load], CODES[Run]])
    assert soon.messages == ["Compiling on 1 of 2 workers for 0 s so far."]
    waits([])
    waits([CODES[Run]])
    time.sleep(0.1)
    waits([CODES[Run]])
    assert len(soon.messages) == 1
