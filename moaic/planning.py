"""From a step to its plan, for one compiled model: the first variant is searched for, the others follow it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields

from moaic.ir.graph import Module
from moaic.passes.build import Plan, build
from moaic.passes.config import Config, Request, parse_request, request_from
from moaic.report import Report
from moaic.runtime import session


def request_of(options: Mapping[str, object]) -> Request:
    """What the person fixed: options of `torch.compile`, and MOAI_PLAN for what they leave open."""
    given = request_from(dict(options))
    ambient = parse_request(os.environ.get("MOAI_PLAN", ""))
    merged = {
        field.name: getattr(given, field.name)
        if getattr(given, field.name) is not None
        else getattr(ambient, field.name)
        for field in fields(Request)
    }
    return Request(**merged)


class Planning:
    """Plans the variants of one captured graph alike."""

    def __init__(self, request: Request) -> None:
        self.request = request

    def plan(self, step: Module) -> Plan:
        """The plan for `step`; raises Diagnostic where the request cannot be met."""
        report = Report.current()
        with report.timed("planning_s"):
            plan = build(step, self._config())
        report.plan = str(plan.config)
        return plan

    def _config(self) -> Config:
        asked = {
            field.name: getattr(self.request, field.name)
            for field in fields(Request)
            if getattr(self.request, field.name) is not None
        }
        asked.setdefault("dp", session.accelerator().flavor // asked.get("tp", 1))
        return Config(**asked)
