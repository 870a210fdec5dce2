"""Sums over parts in time are added to where the parts are made: functions take the sums so far and give the next.

Legal for a result that every call of the function hands to one `moai.accumulate` and to nothing else, if the sum so far
stands above the call. What a matmul makes is then added in the matmul, and never written apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from moaic.ir.graph import NO_ROLE, NOWHERE, Function, Module, Op, Operand, Value
from moaic.ir.op_names import ACCUMULATE, ADD_TO
from moaic.ir.types import TensorType
from moaic.passes.loop_axes import Timed

Sums = Mapping[int, str]
"""Results of a function that it adds to sums, by position, and the element types of these sums."""

Known = dict[tuple[Function, tuple[tuple[int, str], ...]], Function]
"""Functions that add, by what they are made from: the programs of one plan share them."""


def without_sums_of_sums(timed: Timed) -> Timed:
    """`timed` with what is summed over chunks first, and then over micro-batches, added to one sum."""
    main = timed.function
    positions = {result: index for index, op in enumerate(main.ops) for result in op.results}
    reads = main.reads()
    changed: dict[int, Op | None] = {}
    for index, op in enumerate(main.ops):
        links = _links(main, positions, reads, op) if op.name == ACCUMULATE else []
        before = op.operands[0] if links else None
        if not links or (isinstance(before, Value) and positions.get(before, -1) > links[0]):
            continue
        first, last = links[0], links[-1]
        changed[index] = None
        changed[first] = replace(main.ops[first], operands=(before, main.ops[first].operands[1]))
        changed[last] = replace(changed.get(last) or main.ops[last], results=op.results)
    kept = [(changed.get(i, op), phase) for i, (op, phase) in enumerate(zip(main.ops, timed.phases, strict=True))]
    ops = tuple(op for op, _ in kept if op is not None)
    return replace(timed, function=replace(main, ops=ops), phases=tuple(phase for op, phase in kept if op is not None))


def _links(main: Function, positions: Mapping[Value, int], reads: Mapping[Value, int], op: Op) -> list[int]:
    """Positions of the ops that add up, from nothing, what this one alone reads; empty where other ops make it."""
    found: list[int] = []
    value = op.operands[1]
    while isinstance(value, Value) and value in positions and reads[value] == 1:
        found.insert(0, positions[value])
        if main.ops[found[0]].name != ACCUMULATE:
            return []
        value = main.ops[found[0]].operands[0]
    return found if value is None else []


def added_inside(program: Module, known: Known) -> Module:
    """`program` with what can be added inside its functions added there."""
    accumulates = _accumulates(program.main)
    sums = _sums(program.main, accumulates)
    main = replace(program.main, ops=tuple(_instructions(program.main, accumulates, sums)))
    functions = (_adding(function, sums.get(function.name, {}), known) for function in program.functions[:-1])
    return replace(program, functions=(*functions, main))


def _accumulates(main: Function) -> dict[Value, Op]:
    """By part, the instruction that adds it to a sum, where nothing else reads the part."""
    reads = main.reads()
    ops = (op for op in main.ops if op.name == ACCUMULATE)
    return {part: op for op in ops if isinstance(part := op.operands[1], Value) and reads[part] == 1}


def _sums(main: Function, accumulates: Mapping[Value, Op]) -> dict[str, Sums]:
    """By function, the sums that all its calls add to."""
    above: set[Operand] = {None, *main.params}
    found: dict[str, Sums] = {}
    for op in main.ops:
        if op.name == "call":
            here = {
                position: _dtype(accumulates[part])
                for position, part in enumerate(op.results)
                if part in accumulates and accumulates[part].operands[0] in above
            }
            there = found.get(op.callee, here)
            found[op.callee] = {position: dtype for position, dtype in here.items() if there.get(position) == dtype}
        above.update(op.results)
    return found


def _dtype(accumulate: Op) -> str:
    """Element type of the sum while it is added to; it may become narrower with the last part."""
    before = accumulate.operands[0]
    return (before if isinstance(before, Value) else accumulate.results[0]).type.dtype


def _instructions(main: Function, accumulates: Mapping[Value, Op], sums: Mapping[str, Sums]) -> Iterator[Op]:
    """Calls with the sums that they add to; of the accumulates those that begin a sum at nothing, or narrow it."""
    ends: dict[Op, Value] = {}
    for op in main.ops:
        if op in ends:
            if ends[op] is not op.results[0]:
                yield replace(op, operands=(None, ends[op]))
            continue
        if op.name != "call" or not sums[op.callee]:
            yield op
            continue
        before, results = list[Value](), list(op.results)
        for position, dtype in sums[op.callee].items():
            add = accumulates[op.results[position]]
            (total,), start = add.results, add.operands[0]
            if not isinstance(start, Value):
                start = Value(_with_dtype(total.type, dtype), total.name)
                yield replace(add, operands=(None, None), results=(start,))
            same = total.type.dtype == dtype
            ends[add] = results[position] = total if same else Value(_with_dtype(total.type, dtype), total.name)
            before.append(start)
        yield replace(op, operands=(*op.operands, *before), results=tuple(results))


def _adding(function: Function, sums: Sums, known: Known) -> Function:
    """`function` with a further parameter for every sum, and the sums after it in place of what it adds to them."""
    key = function, tuple(sums.items())
    if sums and key not in known:
        known[key] = _made(function, sums)
    return known[key] if sums else function


def _made(function: Function, sums: Sums) -> Function:
    makers = {result: op for op in function.ops for result in op.results}
    params = list(function.params)
    results = list(function.results)
    adds: dict[Op | None, list[Op]] = {}
    for position, dtype in sums.items():
        part = function.results[position]
        maker = makers.get(part)
        total, after = (Value(_with_dtype(part.type, dtype), "sum") for _ in range(2))
        loc = NOWHERE if maker is None else maker.loc
        adds.setdefault(maker, []).append(Op(ADD_TO, (total, part), (after,), {}, loc))
        params.append(total)
        results[position] = after
    ops = [*adds.get(None, ()), *(each for op in function.ops for each in (op, *adds.get(op, ())))]
    more = (NO_ROLE for _ in sums)
    roles = (*function.param_roles, *more) if function.param_roles else ()
    return replace(function, params=tuple(params), ops=tuple(ops), results=tuple(results), param_roles=roles)


def _with_dtype(kind: TensorType, dtype: str) -> TensorType:
    return replace(kind, dtype=dtype)
