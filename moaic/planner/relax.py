"""Relaxation of a request: the part of it that a step can follow where it cannot follow all of it.

Decisions are tried one by one, in the order of `KEPT`. A decision is kept if the simplest plan with all decisions kept
so far can be built; the planner is free to choose those that are dropped.
"""

from __future__ import annotations

from dataclasses import replace

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.passes.config import KEPT, Request, spelled
from moaic.passes.perf.machine import Machine
from moaic.planner import log
from moaic.planner.candidates import candidates
from moaic.planner.worker import CompilerPool, InProcessPool


def relax(step: Module, machine: Machine, request: Request) -> Request:
    """The decisions of `request` that `step` can follow together."""
    pool = InProcessPool()
    pool.begin(step, machine)
    kept = Request()
    for name in KEPT:
        wanted = replace(kept, **{name: getattr(request, name)})
        if wanted != kept and _is_possible(step, machine, wanted, pool):
            kept = wanted
    return kept


def dropped_decisions(request: Request, kept: Request) -> str:
    """The decisions that were dropped, in the form of MOAI_PLAN: `dp=2,micro_batches=2`."""
    names = [name for name in KEPT if getattr(request, name) != getattr(kept, name)]
    return ",".join(f"{name}={spelled(getattr(request, name))}" for name in names)


def _is_possible(step: Module, machine: Machine, request: Request, pool: CompilerPool) -> bool:
    """Whether the simplest plan that keeps to `request` can be built, however much memory it takes."""
    try:
        simplest, *_ = candidates(step, machine.workers, request)
    except Diagnostic:
        return False
    (compiled,) = pool.compile([simplest])
    if compiled.crash:
        log.crashed([simplest], compiled.crash)
    return not compiled.dropped and not compiled.crash
