"""This machine's measures: taken once per flavor, remembered on disk, shared by the planner and whoever asks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache

from moaic.passes.perf import machine as machines
from moaic.passes.perf.machine import Machine
from moaic.runtime.controller import session
from moaic.runtime.controller.calibrate import measured
from moaic.support.cache_folder import cache_folder


@cache
def this_machine() -> Machine:
    """This machine as the planner sees it."""
    return machines.from_text(_measures())


def idle_bytes() -> Mapping[str, int]:
    """Bytes that a worker takes before it is given anything."""
    return json.loads(_measures())["idle"]


@cache
def _measures() -> str:
    """This machine's measures, taken once and remembered on disk."""
    return measured(session.accelerator(), session.SESSION.flavor(), cache_folder(os.environ))
