"""From a step to its plan, for one compiled model: the first variant is searched for, the others follow it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path

from moaic import logging_setup
from moaic.cache_folder import cache_folder
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.passes import machine as machines
from moaic.passes.build import Plan, build
from moaic.passes.candidates import followed
from moaic.passes.config import Config, Request, parse_request, request_from
from moaic.passes.dump import dump
from moaic.passes.machine import Machine
from moaic.passes.plan_cache import search_cached
from moaic.passes.solver_prices import prices_of
from moaic.planner_pool import ProcessPool
from moaic.report import Report
from moaic.runtime import session
from moaic.runtime.measure import measured
from moaic.runtime.threads import cores

COMPILE = "compile"
"""The option that is no decision of the plan: whether its programs are compiled."""


def compiles(options: Mapping[str, object]) -> bool:
    """Whether programs are compiled, or run op by op: slower, but there at once. MOAI_COMPILE where no option says."""
    asked = options.get(COMPILE)
    word = str(os.environ.get("MOAI_COMPILE", "true") if asked is None else asked).lower()
    words = {"true": True, "1": True, "false": False, "0": False}
    if word not in words:
        raise Diagnostic(f"compile={word} is not known", hint="choose true or false")
    return words[word]


def request_of(options: Mapping[str, object]) -> Request:
    """What the person fixed: options of `torch.compile`, and MOAI_PLAN for what they leave open."""
    given = request_from({name: value for name, value in options.items() if name != COMPILE})
    ambient = parse_request(os.environ.get("MOAI_PLAN", ""))
    asked = {field.name: getattr(given, field.name) for field in fields(Request)}
    return Request(**{name: getattr(ambient, name) if value is None else value for name, value in asked.items()})


def prepare() -> None:
    """Has workers and planner processes start, while the graph is being captured."""
    logging_setup.install(os.environ)
    session.accelerator()
    _pool()


def measure() -> None:
    """Has this machine's measures ready, before anything is pending that measuring would run."""
    this_machine()


class Planning:
    """Plans the variants of one step, of one captured graph at concrete sizes, alike."""

    def __init__(self, request: Request, *, strict: bool) -> None:
        """A request that the batch cannot follow is an error if `strict`, else (a last, partial batch) let go."""
        self.request = request
        self._strict = strict
        self._config: Config | None = None

    def plan(self, step: Module) -> Plan:
        """The plan for `step`; raises Diagnostic where the request cannot be met."""
        report = Report.current()
        with report.timed("planning_s"):
            plan = self._search(step) if self._config is None else build(step, self._config, prices_of(this_machine()))
        self._config = plan.config
        report.plan = str(plan.config)
        session.SESSION.planned(report.plan, plan.programs.joint.mesh)
        return plan

    def _search(self, step: Module) -> Plan:
        request = self.request if self._strict else followed(step, this_machine().workers, self.request)
        selection = search_cached(step, this_machine(), request, pool=_pool(), folder=cache_folder(os.environ))
        if folder := os.environ.get("MOAI_DUMP"):
            dump(Path(folder), step, selection)
        _pool().rest()
        return selection.plan


@cache
def _pool() -> ProcessPool:
    """The planner's processes, started when a model is first compiled and kept."""
    return ProcessPool(cores())


@cache
def this_machine() -> Machine:
    """This machine, measured once and remembered on disk."""
    return machines.from_text(measured(session.accelerator(), session.SESSION.flavor(), cache_folder(os.environ)))
