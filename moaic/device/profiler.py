"""`torch.moai.profiler`: PyTorch's profiler with a track per worker in the exported trace."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from moaic.runtime.controller import session
from moaic.runtime.protocol.span import TraceSpan

TraceEvent = dict[str, Any]
"""One event of a Chrome trace."""


class profile(torch.profiler.profile):  # noqa: N801, torch's name
    """`torch.profiler.profile` with one more track per worker in the exported trace.

    A track shows each instruction of the programs that the worker ran, and each other command, in a local trace's time.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.spans: Mapping[int, Sequence[TraceSpan]] = {}
        """Per worker the instructions and commands of the last recorded cycle."""

    def start_trace(self) -> None:
        super().start_trace()
        session.accelerator().trace(on=True)

    def stop_trace(self) -> None:
        """Waits for the workers: all queued commands belong to the trace."""
        self.spans = session.accelerator().trace(on=False)
        super().stop_trace()

    def export_chrome_trace(self, path: str, *args: Any, **options: Any) -> None:
        """Takes the arguments of torch's method, which differ between versions of PyTorch."""
        super().export_chrome_trace(path, *args, **options)
        opened = gzip.open if path.endswith(".gz") else open
        with opened(path, "rt", encoding="utf-8") as file:
            trace = json.load(file)
        trace["traceEvents"] += events(self.spans, int(trace["baseTimeNanoseconds"]))
        with opened(path, "wt", encoding="utf-8") as file:
            json.dump(trace, file)


def events(spans: Mapping[int, Sequence[TraceSpan]], base: int) -> Iterator[TraceEvent]:
    """The tracks of the workers. `base` is the trace's zero, in nanoseconds of Unix time."""
    ahead = time.time_ns() - time.perf_counter_ns() - base
    for rank, done in spans.items():
        track = f"moai worker {rank}"
        yield {"ph": "M", "name": "process_name", "pid": track, "tid": 0, "ts": 0, "args": {"name": track}}
        for span in done:
            yield {
                "ph": "X",
                "cat": span.kind,
                "name": span.name,
                "pid": track,
                "tid": 0,
                "ts": (span.begin + ahead) / 1000,
                "dur": (span.end - span.begin) / 1000,
            }
