"""The order of a program's instructions on workers that overlap communication with computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moaic.ir.graph import Function, Module, Op, Value
from moaic.ir.layout import Owner
from moaic.ir.op_names import ACCUMULATE, ALL_GATHER, REDUCE_SCATTER, SEND


def overlap_order(main: Function) -> list[int]:
    """Positions of the instructions in an order in which gathers and scatters are in flight while a function runs.

    A gather moves one function up; legal where its operand exists before that function, as parameters and their casts
    do. A sum over micro-batches adds the result of a scatter one function later; legal where no instruction reads the
    sum in between. All else keeps its order.

    Before: %g = moai.reduce_scatter %a; %s = moai.accumulate _, %g; %x = moai.all_gather %w; %y = call @f ...
    After: %g = moai.reduce_scatter %a; %x = moai.all_gather %w; %y = call @f ...; %s = moai.accumulate _, %g
    """
    order: list[int] = []
    scattered: set[Value] = set()
    late: list[int] = []
    for position, op in enumerate(main.ops):
        if op.name == ACCUMULATE and not scattered.isdisjoint(op.inputs()):
            late.append(position)
            continue
        if any(not set(main.ops[each].results).isdisjoint(op.inputs()) for each in late):
            order, late = [*order, *late], []
        at = _one_function_earlier(main, order, op) if op.name == ALL_GATHER else len(order)
        order.insert(at, position)
        if op.name == REDUCE_SCATTER:
            scattered.update(op.results)
        elif op.name == "call":
            due = [each for each in late if meet(main.ops[each].results[0].type.layout.owner, op)]
            order, late = [*order, *due], [each for each in late if each not in due]
    return [*order, *late]


def _one_function_earlier(main: Function, order: Sequence[int], op: Op) -> int:
    """Position of the last call by the ranks of `op`; the end if it or a later instruction makes an operand."""
    owner, operands = op.results[0].type.layout.owner, set(op.inputs())
    for at in reversed(range(len(order))):
        before = main.ops[order[at]]
        if not operands.isdisjoint(before.results):
            break
        if before.name == "call" and meet(owner, before):
            return at
    return len(order)


def overlap_schedule(program: Module) -> Module:
    """`program` with its instructions in the order of `overlap_order`."""
    *others, main = program.functions
    ops = tuple(main.ops[position] for position in overlap_order(main))
    return replace(program, functions=(*others, replace(main, ops=ops)))


def meet(owner: Owner, op: Op) -> bool:
    """Whether a rank of `owner` takes part in an op."""
    here = dict(owner)
    # An operand that all ranks hold does not make them all run the op.
    places = (*op.inputs(), *op.results) if op.name == SEND else op.results
    owners = [value.type.layout.owner for value in places]
    return any(all(here.get(axis, at) == at for axis, at in other) for other in owners)
