"""Measurements of this machine: taken once per flavor and kept on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache

from moaic.passes.perf import machine_text
from moaic.passes.perf.machine import Machine
from moaic.runtime.controller import session
from moaic.runtime.controller.calibrate import measured
from moaic.support.cache_folder import cache_folder


@cache
def this_machine() -> Machine:
    """This machine in the planner's terms: rates, latencies, memory."""
    return machine_text.from_text(_measures())


def idle_bytes() -> Mapping[str, int]:
    """Bytes of an idle worker, by kind of memory."""
    return json.loads(_measures())["idle"]


@cache
def _measures() -> str:
    """The measurements as JSON, from disk or taken now."""
    return measured(session.accelerator(), session.SESSION.flavor(), cache_folder(os.environ))
