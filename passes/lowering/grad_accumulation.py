"""Fuse gradient accumulation into the functions that make the gradients of one part.

    %g1 = call @layer.bwd %x1 : f32[64, 64]
    %s1 = moai.accumulate %s0, %g1 : f32[64, 64]
becomes
    %s1 = call @layer.bwd %x1, %s0 : f32[64, 64]    # @layer.bwd ends with %after = moai.add_to %sum, %g

Legal for a result that every call of the function passes to one `moai.accumulate` and to nothing else, if the sum so
far exists before the call. A matmul then adds its result to the sum, and the gradient of one part is never written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from moaic.ir.graph import NO_ROLE, NOWHERE, Function, Module, Op, Operand, Value
from moaic.ir.op_names import ACCUMULATE, ADD_TO
from moaic.ir.types import TensorType
from moaic.passes.loop_axes import Unrolled

Sums = Mapping[int, str]
"""By position, the results that a function adds to sums, and the element types of these sums."""

AccumulatingFunctions = dict[tuple[Function, tuple[tuple[int, str], ...]], Function]
"""Accumulating functions, by the function and sums they are made from: the programs of one plan share them."""


def merged_accumulation(unrolled: Unrolled) -> Unrolled:
    """`unrolled` with sums over chunks that are added to a sum over micro-batches merged into it.

        %c0 = moai.accumulate _, %g0        # chunk 0 of micro-batch 1
        %c1 = moai.accumulate %c0, %g1      # chunk 1
        %s1 = moai.accumulate %s0, %c1      # %s0: micro-batch 0
    becomes
        %c0 = moai.accumulate %s0, %g0
        %s1 = moai.accumulate %c0, %g1
    """
    main = unrolled.function
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
    kept = [(changed.get(i, op), phase) for i, (op, phase) in enumerate(zip(main.ops, unrolled.phases, strict=True))]
    ops = tuple(op for op, _ in kept if op is not None)
    return replace(
        unrolled, function=replace(main, ops=ops), phases=tuple(phase for op, phase in kept if op is not None)
    )


def _links(main: Function, positions: Mapping[Value, int], reads: Mapping[Value, int], op: Op) -> list[int]:
    """Positions of the chain of accumulations, begun at no sum, that only `op` reads; empty if there is none."""
    chain: list[int] = []
    value = op.operands[1]
    while isinstance(value, Value) and value in positions and reads[value] == 1:
        chain.insert(0, positions[value])
        if main.ops[chain[0]].name != ACCUMULATE:
            return []
        value = main.ops[chain[0]].operands[0]
    return chain if value is None else []


@dataclass(frozen=True, slots=True)
class Merged:
    """A program after accumulation was fused into its functions, and for each instruction the one that it was."""

    program: Module
    origins: tuple[int, ...]


def added_inside(program: Module, known: AccumulatingFunctions) -> Merged:
    """`program` with every accumulation fused into the function that makes the part, where that is legal."""
    accumulates = _accumulates(program.main)
    sums = _sums(program.main, accumulates)
    instructions = [*_instructions(program.main, accumulates, sums)]
    main = replace(program.main, ops=tuple(op for _, op in instructions))
    functions = (_adding(function, sums.get(function.name, {}), known) for function in program.functions[:-1])
    return Merged(replace(program, functions=(*functions, main)), tuple(origin for origin, _ in instructions))


def _accumulates(main: Function) -> dict[Value, Op]:
    """By part, the instruction that adds it to a sum, if nothing else reads the part."""
    reads = main.reads()
    ops = (op for op in main.ops if op.name == ACCUMULATE)
    return {part: op for op in ops if isinstance(part := op.operands[1], Value) and reads[part] == 1}


def _sums(main: Function, accumulates: Mapping[Value, Op]) -> dict[str, Sums]:
    """By function, the sums that every call of it adds to."""
    available: set[Operand] = {None, *main.params}
    sums: dict[str, Sums] = {}
    for op in main.ops:
        if op.name == "call":
            here = {
                position: _dtype(accumulates[part])
                for position, part in enumerate(op.results)
                if part in accumulates and accumulates[part].operands[0] in available
            }
            so_far = sums.get(op.callee, here)
            sums[op.callee] = {position: dtype for position, dtype in here.items() if so_far.get(position) == dtype}
        available.update(op.results)
    return sums


def _dtype(accumulate: Op) -> str:
    """Element type of the sum before the last part is added, after which it may be narrower."""
    before = accumulate.operands[0]
    return (before if isinstance(before, Value) else accumulate.results[0]).type.dtype


def _instructions(
    main: Function, accumulates: Mapping[Value, Op], sums: Mapping[str, Sums]
) -> Iterator[tuple[int, Op]]:
    """Calls with the sums that they add to; before each instruction the position of the one that it was.

    An accumulation remains where a sum begins, and as a cast where the last part makes it narrower:

        %s0 = moai.accumulate _, _ : f32[64, 64]            # zeros
        %t = call @layer.bwd %x, %s0 : f32[64, 64]
        %s1 = moai.accumulate _, %t : bf16[64, 64]
    """
    ends: dict[Op, Value] = {}
    for index, op in enumerate(main.ops):
        if op in ends:
            if ends[op] is not op.results[0]:
                yield index, replace(op, operands=(None, ends[op]))
            continue
        if op.name != "call" or not sums[op.callee]:
            yield index, op
            continue
        before, results = list[Value](), list(op.results)
        for position, dtype in sums[op.callee].items():
            add = accumulates[op.results[position]]
            (total,), start = add.results, add.operands[0]
            if not isinstance(start, Value):
                start = Value(_with_dtype(total.type, dtype), total.name)
                yield index, replace(add, operands=(None, None), results=(start,))
            same = total.type.dtype == dtype
            ends[add] = results[position] = total if same else Value(_with_dtype(total.type, dtype), total.name)
            before.append(start)
        yield index, replace(op, operands=(*op.operands, *before), results=tuple(results))


def _adding(function: Function, sums: Sums, known: AccumulatingFunctions) -> Function:
    """`function` with a further parameter for every sum; it returns the new sums instead of the parts."""
    key = function, tuple(sums.items())
    if sums and key not in known:
        known[key] = _accumulating(function, sums)
    return known[key] if sums else function


def _accumulating(function: Function, sums: Sums) -> Function:
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
    ops = [*adds.get(None, ()), *(new for op in function.ops for new in (op, *adds.get(op, ())))]
    more = (NO_ROLE for _ in sums)
    roles = (*function.param_roles, *more) if function.param_roles else ()
    return replace(function, params=tuple(params), ops=tuple(ops), results=tuple(results), param_roles=roles)


def _with_dtype(tensor_type: TensorType, dtype: str) -> TensorType:
    return replace(tensor_type, dtype=dtype)
