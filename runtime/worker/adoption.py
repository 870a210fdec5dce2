"""Change of programs from op by op to compiled: of all on all ranks, or of none, so that no two disagree in bits.

A step whose forward ran in one way has its backward in the same, and replicas on several ranks are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from moaic.runtime.comm.transport import Group
from moaic.runtime.comm.worker_context import WorkerContext
from moaic.runtime.worker.program import Program

FAILED, DONE = range(2)

ELSEWHERE: Final = "another worker could not compile them"
"""Why a worker goes on op by op whose own functions are compiled; the other one says more."""


def adopt(programs: Sequence[Program], context: WorkerContext) -> str:
    """Have programs of one mesh run compiled; return why they go on op by op, if that is not possible."""
    takers = [program for program in programs if program.takes_part]
    if not takers:
        return ""
    error = _compile(takers)
    ranks = Group.of(range(takers[0].mesh.ranks), context.rank)
    alike = ranks.size == 1 or context.transport.agree(ranks, FAILED if error else DONE)
    if error or not alike:
        return error or ELSEWHERE
    for program in takers:
        program.adopt()
    return ""


def _compile(programs: Sequence[Program]) -> str:
    """Compile all functions; return the error, if there is one. Whatever it is, ops can still run one by one."""
    try:
        for program in programs:
            program.compile()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return ""
