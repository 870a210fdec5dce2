"""The order of a program's instructions on workers that overlap communication with computation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from moaic.ir.graph import Function, Module, Op, Value
from moaic.ir.layout import Owner
from moaic.ir.op_names import ACCUMULATE, ALL_GATHER, REDUCE_SCATTER, SEND

Instruction = TypeVar("Instruction", bound=Hashable)
Meet = Callable[[Instruction, Instruction], bool]
"""Whether a rank that runs the first also runs the second."""


def overlap_order(main: Function) -> list[int]:
    """Positions of the instructions in the order of `overlapping`."""
    makers = {result: position for position, op in enumerate(main.ops) for result in op.results}

    def meets(one: int, other: int) -> bool:
        return meet(main.ops[one].results[0].type.layout.owner, main.ops[other])

    return overlapping(
        range(len(main.ops)),
        main.ops.__getitem__,
        lambda position: {makers[value] for value in main.ops[position].inputs() if value in makers},
        meets,
    )


def overlapping(
    instructions: Iterable[Instruction],
    op_of: Callable[[Instruction], Op],
    makers: Callable[[Instruction], Collection[Instruction]],
    meets: Meet[Instruction],
) -> list[Instruction]:
    """The instructions in an order in which gathers and scatters are in flight while a function runs.

    A gather moves one function up; legal where its operand exists before that function, as parameters and their casts
    do. A sum over micro-batches adds the result of a scatter one function later; legal where no instruction reads the
    sum in between. All else keeps its order. `makers` are the instructions that make the operands of one.

    Before: %g = moai.reduce_scatter %a; %s = moai.accumulate _, %g; %x = moai.all_gather %w; %y = call @f ...
    After: %g = moai.reduce_scatter %a; %x = moai.all_gather %w; %y = call @f ...; %s = moai.accumulate _, %g
    """
    order: list[Instruction] = []
    scattered: set[Instruction] = set()
    late: list[Instruction] = []
    for instruction in instructions:
        op, read = op_of(instruction), makers(instruction)
        if op.name == ACCUMULATE and not scattered.isdisjoint(read):
            late.append(instruction)
            continue
        if any(each in read for each in late):
            order += late
            late = []
        at = _one_function_earlier(instruction, order, op_of, read, meets) if op.name == ALL_GATHER else len(order)
        order.insert(at, instruction)
        if op.name == REDUCE_SCATTER:
            scattered.add(instruction)
        elif op.name == "call" and late:
            due = [each for each in late if meets(each, instruction)]
            order += due
            late = [each for each in late if each not in due]
    return [*order, *late]


def _one_function_earlier(
    gather: Instruction,
    order: Sequence[Instruction],
    op_of: Callable[[Instruction], Op],
    read: Collection[Instruction],
    meets: Meet[Instruction],
) -> int:
    """Position of the last call by the ranks of `gather`; the end if it or a later instruction makes an operand."""
    for at in reversed(range(len(order))):
        if order[at] in read:
            break
        if op_of(order[at]).name == "call" and meets(gather, order[at]):
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
    owners = [value.type.layout.owner for value in places(op)]
    return any(all(here.get(axis, at) == at for axis, at in other) for other in owners)


def places(op: Op) -> Sequence[Value]:
    """Values whose owners run an op: its results, and what is sent; any other operand may be on more ranks."""
    return (*op.inputs(), *op.results) if op.name == SEND else op.results
