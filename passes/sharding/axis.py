"""The mesh axis that a pass adds to a module, the decisions that the partitioner asks for, and the error it raises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Function, Op, Role, Value
from moaic.ir.layout import State
from moaic.ir.rules import Strategy


@dataclass(frozen=True, slots=True)
class Axis:
    """A mesh axis that is being added. The parts of a loop axis run one after the other, on the same rank."""

    name: str
    size: int
    is_loop: bool = False


class UnshardableOp(Diagnostic):
    """The axis cannot be added: an op needs the whole of a value that the axis shards. The message names the op."""


MaterializedStates = tuple[State, ...]
"""The states in which a value exists so far; the first is the one in which it was made."""

StrategySelector = Callable[[Function, int, Sequence[MaterializedStates], Sequence[Strategy]], Strategy]
"""Selects one of the candidate strategies of op number i of a function, given the states that its operands have."""

ResultStates = Callable[[Role, Value, State], State]
"""The state that a main result must have, given its role and the state in which it is made."""

ParamStates = Callable[[Function], tuple[State, ...]]
"""The states in which a function takes its parameters, where they are fixed from outside."""


def unshardable(axis: Axis, op: Op, why: str) -> UnshardableOp:
    """The error that names the op at which `axis` fails."""
    where = f" in {op.loc.module}" if op.loc.module else ""
    line = f' ("{op.loc.file}":{op.loc.line})' if op.loc.file else ""
    return UnshardableOp(
        f"{axis.name}={axis.size} cannot pass {op.name}{where}{line}: it needs the whole batch, and {why}"
    )
