"""The lines of the user's program that commands carry."""

from __future__ import annotations

import inspect
from threading import Thread

from moaic.runtime.controller.source_lines import SourceLine, SourceLines


def test_each_thread_has_a_line_of_its_own() -> None:
    lines, found = SourceLines(), list[int]()

    def note() -> None:
        found.append(lines.here())

    first = inspect.getsourcelines(note)[1]
    note()
    thread = Thread(target=note)
    thread.start()
    thread.join()
    assert [lines.line(number) for number in found] == [SourceLine(__file__, first + 1)] * 2
