"""Spans of a worker, in answers of a bounded length."""

from __future__ import annotations

import pytest

from moaic.runtime.protocol.frames import encode
from moaic.runtime.protocol.limits import LIMITS
from moaic.runtime.protocol.span import ANSWERED_SPANS
from moaic.runtime.worker import tracer
from moaic.runtime.worker.tracer import Tracer


def test_long_traces_are_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracer, "ANSWERED_SPANS", 3)
    spans = Tracer(lambda: None)
    for name in "abcde":
        spans.begin(name, "command")
    spans.end()
    taken = [[name for name, *_ in spans.take(on=False)] for _ in range(3)]
    assert taken == [["a", "b", "c"], ["d", "e"], []]


def test_an_answer_with_long_names_is_below_the_limits_of_a_frame() -> None:
    span = encode(["x" * 500, "communicate", 2**62, 2**62])
    assert ANSWERED_SPANS * len(span) < LIMITS.body_bytes
    assert LIMITS.values > ANSWERED_SPANS * 5
