"""Cut a step into pipeline stages: every value of the main function gets a stage, its owner on the axis `pp`.

The forward is partitioned into consecutive stages of equal cost, or of the shares that the plan names, with boundaries
that few bytes cross; a backward op is in the stage of its forward. Cheap values that depend on inputs and parameters
alone (masks, rotary tables, counts of labels) float: each stage that reads one computes it. A parameter is owned by the
first stage that reads it, which sends it to the others; the gradients of one parameter from several stages are summed
over micro-batches first, and sent once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Function, Location, Module, Op, Value
from moaic.ir.layout import PARTIAL, REPLICATED
from moaic.ir.op_names import ALL_REDUCE, SEND
from moaic.ir.ops import Kind, kind_of, rule_of
from moaic.ir.types import TensorType
from moaic.passes.loop_axes import MICRO_BATCHES, combines_parts
from moaic.passes.pipeline.inline_layers import with_layers_inlined
from moaic.passes.pipeline.spine import Spine
from moaic.passes.schedules import Schedule, forwards_only, schedule_of
from moaic.passes.stage_shares import EQUAL, shares_of_stages
from moaic.passes.transforms.dce import without_dead_ops

AXIS = "pp"

LATENCY_BYTES = 1 << 16
"""Bytes that a link could carry in the latency of a send."""

CLONE_FACTOR = 2
"""A send writes and reads each byte: recomputing a value may touch as many times its bytes."""


@dataclass(frozen=True, slots=True)
class AssignStages:
    name: ClassVar[str] = AXIS
    summary: ClassVar[str] = (
        "assign layers to pipeline stages: the number of workers, the schedule, then the shares of the workers"
    )
    workers: int = 2
    schedule: str = "1f1b"
    shares: str = EQUAL

    def apply(self, module: Module) -> Module:
        parts = module.mesh.size(MICRO_BATCHES)
        schedule = schedule_of(self.schedule, self.workers, parts)
        return in_stages(module, schedule, shares_of_stages(self.shares, schedule))


def in_stages(module: Module, schedule: Schedule, shares: Sequence[int]) -> Module:
    """`module` with an axis `pp` of the schedule's stages, which have these shares of the work.

    Raises Diagnostic where it cannot be cut into these.
    """
    if not module.main.gradients:
        schedule = forwards_only(schedule)
    stages, parts = schedule.stages, module.mesh.size(MICRO_BATCHES)
    if schedule.parts != parts:
        raise Diagnostic(f"the schedule is for {schedule.parts} micro-batches, the plan has micro_batches={parts}")
    module = with_layers_inlined(module, shares)
    main = _summed_per_stage(module.main, _StageAssignment(module, module.main, shares))
    mesh = module.mesh.with_axis(AXIS, stages, outermost=True)
    placed = _StagePlacer(module, main, shares).run()
    return without_dead_ops(Module((*module.functions[:-1], placed), mesh, schedule.rows))


class _StageAssignment:
    """The stage of each op of the main function that does not float, and of each parameter."""

    def __init__(self, module: Module, main: Function, shares: Sequence[int]) -> None:
        self.main = main
        spine = Spine(module, main)
        self.producer, self.forward, self.floating = spine.producer, spine.forward, spine.floating
        self.reads = self._params_read()
        self.stage = spine.cut(shares)
        self._place_backward()
        self.owners = self._param_owners()

    def of(self, value: Value) -> int | None:
        """The stage that makes a value; None for parameters and floating values."""
        return self.stage.get(self.producer.get(value, -1))

    def _place_backward(self) -> None:
        """The stages of the ops that neither float nor belong to the forward.

        An op is in the stage of the forward op at its place in the model, but in no higher one than the backward ops
        that it reads, since gradients flow to lower stages. With two forward ops on stages 0 and 1:

            %d1 = aten.mm %dy, %bt : f32[8{mb}, 64] in "second" backward       # on pp=1, as "second" is
            %d0 = aten.mul.Tensor %d1, %u : f32[8{mb}, 64] in "first" backward  # on pp=0, as "first" is

        An op whose place is unknown or on several stages is where the highest forward value that it reads is made.
        """
        stages_at = self._stages_by_place()
        readers = self._readers(self.stage)
        for i, op in enumerate(self.main.ops):
            if i in self.stage or i in self.floating:
                continue
            operands = [(self.producer[v] in self.forward, s) for v in op.inputs() if (s := self.of(v)) is not None]
            params = {param for value in op.inputs() for param in self.reads.get(value, ())}
            forward_stages = [stage for forward, stage in operands if forward]
            forward_stages += [next(iter(readers[param])) for param in params if len(readers[param]) == 1]
            here = stages_at[op.loc.module, op.loc.file, op.loc.line]
            own = next(iter(here)) if len(here) == 1 else max(forward_stages, default=None)
            limits = [stage for forward, stage in operands if not forward] + ([own] if own is not None else [])
            self.stage[i] = min(limits, default=0)

    def _stages_by_place(self) -> dict[tuple[str, str, int], set[int]]:
        stages: dict[tuple[str, str, int], set[int]] = defaultdict(set)
        for i, stage in self.stage.items():
            loc = self.main.ops[i].loc
            if loc.module:
                stages[loc.module, loc.file, loc.line].add(stage)
        return stages

    def _params_read(self) -> dict[Value, frozenset[Value]]:
        """For parameters and floating values, the parameters that they depend on."""
        reads = {param: frozenset((param,)) for param in self.main.params}
        for i in sorted(self.floating):
            op = self.main.ops[i]
            read = frozenset[Value]().union(*(reads[value] for value in op.inputs()))
            reads.update((result, read) for result in op.results)
        return reads

    def _readers(self, stages: Mapping[int, int]) -> dict[Value, set[int]]:
        """For every parameter the stages that read it, directly or through floating values."""
        readers: dict[Value, set[int]] = defaultdict(set)
        for i, stage in stages.items():
            for value in self.main.ops[i].inputs():
                for param in self.reads.get(value, ()):
                    readers[param].add(stage)
        return readers

    def _param_owners(self) -> dict[Value, int]:
        """The owner of each persistent parameter: the first stage that reads it."""
        readers = self._readers(self.stage)
        kinds = {param: self.main.param_role(i).kind for i, param in enumerate(self.main.params)}
        return {param: min(stages) for param, stages in readers.items() if kinds[param] in ("param", "buffer")}


def _summed_per_stage(main: Function, assignment: _StageAssignment) -> Function:
    """`main` with terms of several stages summed over micro-batches before they are added to each other.

        %g = aten.add.Tensor %g0, %g1 : f32[64, 64] +mb        # %g0 on pp=0, %g1 on pp=1: a send per micro-batch
        %s = moai.all_reduce %g {axis = "mb"} : f32[64, 64]
    becomes
        %s0 = moai.all_reduce %g0 {axis = "mb"} : f32[64, 64]  # and %s1 of %g1
        %s = aten.add.Tensor %s0, %s1 : f32[64, 64]            # one send

    Legal because addition, as every linear op, commutes with the sum over micro-batches.
    """
    summed: dict[Value, Value] = {}
    mapping: dict[Value, Value] = {}
    ops: list[Op] = []
    for op in main.ops:
        inputs = list(op.inputs())
        if combines_parts(op) and inputs[0] in summed:
            mapping[op.results[0]] = summed[inputs[0]]
        elif any(value in summed for value in inputs) or _adds_stages(op, assignment):
            terms = [
                i
                for i, value in enumerate(inputs)
                if value in summed or value.type.layout.state(MICRO_BATCHES) != REPLICATED
            ]
            complete = {inputs[i]: _sum_parts(inputs[i], op, ops) for i in terms if inputs[i] not in summed} | summed
            if not _is_linear(op, terms):
                raise Diagnostic(f"pp cannot pass {op.name}: it reads a sum of several stages before its last term")
            results = tuple(Value(_summed_type(result), result.name) for result in op.results)
            ops.append(replace(op.with_operands(mapping | complete), results=results))
            summed.update(zip(op.results, results, strict=True))
        else:
            ops.append(op.with_operands(mapping))
    results = tuple(mapping.get(value, value) for value in main.results)
    return replace(main, ops=tuple(ops), results=results) if summed else main


def _adds_stages(op: Op, assignment: _StageAssignment) -> bool:
    partial = all(value.type.layout.state(MICRO_BATCHES) == PARTIAL for value in op.inputs())
    return op.name == "aten.add.Tensor" and partial and len({assignment.of(value) for value in op.inputs()}) > 1


def _is_linear(op: Op, terms: Sequence[int]) -> bool:
    """Whether the op is linear in these operands together; its other operands are equal in all micro-batches."""
    return op.name != "call" and frozenset(terms) in rule_of(op).linear


def _sum_parts(value: Value, reader: Op, ops: list[Op]) -> Value:
    total = Value(_summed_type(value), value.name)
    ops.append(Op(ALL_REDUCE, (value,), (total,), {"axis": MICRO_BATCHES}, reader.loc))
    return total


def _summed_type(value: Value) -> TensorType:
    return value.type.with_layout(value.type.layout.with_state(MICRO_BATCHES, REPLICATED))


class _StagePlacer:
    """Rewrites the main function with every op on its stage, and sends and recomputation between stages."""

    def __init__(self, module: Module, main: Function, shares: Sequence[int]) -> None:
        self.assignment = _StageAssignment(module, main, shares)
        self.main = main
        self.ops: list[Op] = []
        self.params = {param: self._param(param) for param in main.params}
        self.labelled = {label: param for i, param in enumerate(main.params) if (label := main.param_role(i).label)}
        self.on_stage: dict[tuple[Value, int], Value] = {}
        self.first_stage: dict[Value, int] = {}

    def run(self) -> Function:
        main = self.main
        for i, op in enumerate(main.ops):
            if i not in self.assignment.floating:
                self._emit(op, self.assignment.stage[i])
        results = tuple(self._result(i, value) for i, value in enumerate(main.results))
        params = tuple(self.params[param] for param in main.params)
        return replace(main, params=params, ops=tuple(self.ops), results=results)

    def _param(self, param: Value) -> Value:
        owner = self.assignment.owners.get(param)
        return param if owner is None else _on_stage(param, owner)

    def _result(self, index: int, value: Value) -> Value:
        """The result on its stage: a gradient or an update on that of its parameter."""
        role = self.main.result_role(index)
        owner = self.labelled.get(role.label) if role.kind in ("grad", "update") else None
        owners = [self.assignment.owners.get(param) for param in (owner, value) if param is not None]
        places = [*owners, self.assignment.of(value), self.first_stage.get(value), 0]
        return self._on(value, next(place for place in places if place is not None))

    def _emit(self, op: Op, stage: int) -> None:
        """`op` at `stage`, after its operands have been sent to that stage or recomputed there."""
        given = {value: self._on(value, stage) for value in dict.fromkeys(op.inputs())}
        results = tuple(_on_stage(result, stage) for result in op.results)
        self.ops.append(replace(op.with_operands(given), results=results))
        for old, new in zip(op.results, results, strict=True):
            self.on_stage[old, stage] = new
            self.first_stage.setdefault(old, stage)

    def _on(self, value: Value, stage: int) -> Value:
        """`value` on `stage`, sent or recomputed there if need be."""
        known = self.on_stage.get((value, stage))
        if known is not None:
            return known
        if value in self.params:
            owner = self.assignment.owners.get(value)
            return self.params[value] if owner is None or owner == stage else self._sent(value, owner, stage)
        source = self.first_stage.get(value)
        index = self.assignment.producer[value]
        if index not in self.assignment.floating or (source is not None and not self._is_cheaper_anew(value, stage)):
            assert source is not None, f"%{value.name} is read before it is made"
            return self._sent(value, source, stage)
        self._emit(self.main.ops[index], stage)
        return self.on_stage[value, stage]

    def _sent(self, value: Value, source: int, stage: int) -> Value:
        here = self.params[value] if value in self.params else self.on_stage[value, source]
        sent = self.on_stage[value, stage] = _on_stage(value, stage)
        index = self.assignment.producer.get(value)
        loc = Location() if index is None else self.main.ops[index].loc
        self.ops.append(Op(SEND, (here,), (sent,), {"axis": AXIS}, loc))
        return sent

    def _is_cheaper_anew(self, value: Value, stage: int) -> bool:
        """Whether recomputing a floating value on `stage` touches fewer bytes than sending it does.

            %m = aten.triu %ones : f32[4096, 4096] on pp=0       # %ones = aten.full, which needs no operand
            %s = moai.send %m {axis = "pp"} : f32[4096, 4096] on pp=1
        is dearer than
            %ones = aten.full {size = [4096, 4096], fill_value = 1.0} : f32[4096, 4096] on pp=1
            %m = aten.triu %ones : f32[4096, 4096] on pp=1
        where these two write fewer bytes than CLONE_FACTOR times those of %m.
        """
        most = CLONE_FACTOR * value.type.nbytes() + LATENCY_BYTES
        waiting, seen, touched = [value], set[Value](), 0
        while waiting and touched <= most:
            current = waiting.pop()
            if current in seen or (current, stage) in self.on_stage:
                continue
            seen.add(current)
            index = self.assignment.producer.get(current)
            if index is None:
                owner = self.assignment.owners.get(current)
                touched += current.type.nbytes() * CLONE_FACTOR if owner not in (None, stage) else 0
                continue
            op = self.main.ops[index]
            touched += 0 if kind_of(op) is Kind.VIEW else current.type.nbytes()
            waiting += op.inputs()
        return touched <= most


def _on_stage(value: Value, stage: int) -> Value:
    return Value(value.type.with_layout(value.type.layout.with_owner(AXIS, stage)), value.name)
