"""A plan that was asked for bends: what a step can follow of it where it cannot follow all.

Each decision is taken up by itself, and kept if the simplest plan with all that was kept can be built; what is let go
is left to the planner.
"""

from __future__ import annotations

from dataclasses import replace

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.passes.config import KEPT, Request, spelled
from moaic.passes.perf.machine import Machine
from moaic.planner import log
from moaic.planner.candidates import candidates
from moaic.planner.worker import CompilerPool, Here


def followed(step: Module, machine: Machine, request: Request) -> Request:
    """The most of `request` that `step` can follow."""
    workshop = Here()
    workshop.begin(step, machine)
    kept = Request()
    for name in KEPT:
        wanted = replace(kept, **{name: getattr(request, name)})
        if wanted != kept and _is_possible(step, machine, wanted, workshop):
            kept = wanted
    return kept


def let_go(request: Request, kept: Request) -> str:
    """`dp=2,micro_batches=2`: what of a request was not kept, in the form in which it was asked for."""
    names = [name for name in KEPT if getattr(request, name) != getattr(kept, name)]
    return ",".join(f"{name}={spelled(getattr(request, name))}" for name in names)


def _is_possible(step: Module, machine: Machine, request: Request, workshop: CompilerPool) -> bool:
    """Whether the simplest plan that keeps to `request` can be built, however much memory it takes."""
    try:
        simplest, *_ = candidates(step, machine.workers, request)
    except Diagnostic:
        return False
    (made,) = workshop.compile([simplest])
    if made.crash:
        log.crashed([simplest], made.crash)
    return not made.dropped and not made.crash
