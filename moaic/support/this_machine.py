"""Measurements of this machine: taken once per flavor and kept on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache

from moaic.passes.perf import machine_text
from moaic.passes.perf.machine import Machine
from moaic.runtime.controller import session
from moaic.runtime.controller.calibrate import OLD, drop, measured
from moaic.support.cache_folder import cache_folder
from moaic.support.kernel_profile import this_profile


@cache
def this_machine() -> Machine:
    """This machine in the planner's terms: rates, latencies, memory."""
    return machine_text.from_text(_measures())


def idle_bytes() -> Mapping[str, int]:
    """Bytes of an idle worker, by kind of memory."""
    return json.loads(_measures())["idle"]


def measured_anew() -> Machine:
    """This machine, measured now; what was known of it and of its kernels is dropped."""
    folder, flavor = cache_folder(os.environ), session.SESSION.flavor()
    this_profile().forget()
    if folder is not None:
        drop(folder, flavor)
    _measures.cache_clear()
    this_machine.cache_clear()
    return this_machine()


def forget_old_measurements() -> bool:
    """Whether measurements on disk were old, and are gone: the next program measures anew."""
    folder = cache_folder(os.environ)
    if folder is None or not drop(folder, session.SESSION.flavor(), OLD):
        return False
    this_profile().forget()
    return True


@cache
def _measures() -> str:
    """The measurements as JSON, from disk or taken now."""
    return measured(session.accelerator(), session.SESSION.flavor(), cache_folder(os.environ))
