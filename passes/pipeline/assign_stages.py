"""Cut a step into pipeline stages: every value of the main function gets the stage that holds it as its home on `pp`.

The forward is cut into runs of equal cost, where little has to be passed on; what a backward op computes belongs where
its forward is. What is cheap to make from inputs and parameters alone (masks, rotary tables, counts of labels) floats:
it is made wherever it is read. A parameter rests at the first stage that reads it and is sent to others; gradients of
one parameter from several stages are summed over micro-batches first, and sent once.
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
from moaic.passes.loop_axes import MICRO_BATCHES, finishes
from moaic.passes.pipeline.balanced_partition import cut
from moaic.passes.pipeline.inline_layers import cost_of, opened
from moaic.passes.schedules import Schedule, forwards_only, schedule_of
from moaic.passes.transforms.dce import needed_forward, without_dead_ops

AXIS = "pp"

LATENCY_BYTES = 1 << 16
"""Bytes that could be passed on in the time that a send takes to begin."""

CLONE_FACTOR = 2
"""A send writes and reads each byte; so what is made anew may touch that many times the bytes of the value itself."""


@dataclass(frozen=True, slots=True)
class CutIntoStages:
    name: ClassVar[str] = AXIS
    summary: ClassVar[str] = "cut into pipeline stages: a number of workers, then perhaps `:` and a schedule"
    workers: int = 2
    schedule: str = "1f1b"

    def apply(self, module: Module) -> Module:
        parts = module.mesh.size(MICRO_BATCHES)
        return in_stages(module, schedule_of(self.schedule, self.workers, parts))


def in_stages(module: Module, schedule: Schedule) -> Module:
    """`module` with an axis `pp` of the schedule's stages; raises Diagnostic where it does not fall into these."""
    if not module.main.gradients:
        schedule = forwards_only(schedule)
    stages, parts = schedule.stages, module.mesh.size(MICRO_BATCHES)
    if schedule.parts != parts:
        raise Diagnostic(f"the schedule is for {schedule.parts} micro-batches, the plan has micro_batches={parts}")
    module = opened(module, stages)
    main = _summed_apart(module.main, _Assigned(module, module.main, stages))
    mesh = module.mesh.with_axis(AXIS, stages, outermost=True)
    placed = _Placer(module, main, stages).run()
    return without_dead_ops(Module((*module.functions[:-1], placed), mesh, schedule.rows))


class _Assigned:
    """The stage of each op of the main function that does not float, and of each parameter."""

    def __init__(self, module: Module, main: Function, stages: int) -> None:
        self.module = module
        self.main = main
        self.producer = {result: i for i, op in enumerate(main.ops) for result in op.results}
        self.floating = self._floating()
        self.reads = self._params_read()
        self.forward = needed_forward(main)
        spine = [i for i in sorted(self.forward) if i not in self.floating]
        self.stage = dict(zip(spine, self._cut(spine, stages), strict=True))
        self._place_backward()
        self.homes = self._param_homes()

    def of(self, value: Value) -> int | None:
        """The stage that makes a value; None for parameters and what floats."""
        return self.stage.get(self.producer.get(value, -1))

    def _floating(self) -> set[int]:
        found: set[int] = set()
        for i, op in enumerate(self.main.ops):
            cheap = op.name != "call" and kind_of(op) is not Kind.HEAVY and not finishes(op)
            if cheap and all(value not in self.producer or self.producer[value] in found for value in op.inputs()):
                found.add(i)
        return found

    def _cut(self, spine: Sequence[int], stages: int) -> list[int]:
        if len(spine) < stages:
            raise Diagnostic(f"pp={stages} needs {stages} stages, and the forward has {len(spine)} ops to share out")
        costs = [cost_of(self.module, self.main.ops[i]) for i in spine]
        return cut(costs, self._crossing(spine), stages)

    def _crossing(self, spine: Sequence[int]) -> list[int]:
        """For each position of the spine but the first, the bytes that a cut before it would have to pass on."""
        place = {i: at for at, i in enumerate(spine)}
        change = [0] * (len(spine) + 1)
        last: dict[Value, int] = {}
        for at, i in enumerate(spine):
            inputs = self.main.ops[i].inputs()
            last.update((value, at) for value in inputs if self.producer.get(value, -1) in place)
        for value, end in last.items():
            change[place[self.producer[value]] + 1] += value.type.nbytes()
            change[end + 1] -= value.type.nbytes()
        crossing: list[int] = []
        live = 0
        for at in range(1, len(spine)):
            live += change[at]
            crossing.append(live)
        return crossing

    def _place_backward(self) -> None:
        sides = self._stages_by_place()
        readers = self._readers(self.stage)
        for i, op in enumerate(self.main.ops):
            if i in self.stage or i in self.floating:
                continue
            made = [(self.producer[v] in self.forward, s) for v in op.inputs() if (s := self.of(v)) is not None]
            read = {param for value in op.inputs() for param in self.reads.get(value, ())}
            below = [stage for forward, stage in made if forward]
            below += [next(iter(readers[param])) for param in read if len(readers[param]) == 1]
            place = sides[op.loc.module, op.loc.file, op.loc.line]
            own = next(iter(place)) if len(place) == 1 else max(below, default=None)
            limits = [stage for forward, stage in made if not forward] + ([own] if own is not None else [])
            self.stage[i] = min(limits, default=0)

    def _stages_by_place(self) -> dict[tuple[str, str, int], set[int]]:
        found: dict[tuple[str, str, int], set[int]] = defaultdict(set)
        for i, stage in self.stage.items():
            loc = self.main.ops[i].loc
            if loc.module:
                found[loc.module, loc.file, loc.line].add(stage)
        return found

    def _params_read(self) -> dict[Value, frozenset[Value]]:
        """The parameters from which alone parameters and floating values are made."""
        reads = {param: frozenset((param,)) for param in self.main.params}
        for i in sorted(self.floating):
            op = self.main.ops[i]
            read = frozenset[Value]().union(*(reads[value] for value in op.inputs()))
            reads.update((result, read) for result in op.results)
        return reads

    def _readers(self, stages: Mapping[int, int]) -> dict[Value, set[int]]:
        """For every parameter the stages that read it, also by way of what floats."""
        found: dict[Value, set[int]] = defaultdict(set)
        for i, stage in stages.items():
            for value in self.main.ops[i].inputs():
                for param in self.reads.get(value, ()):
                    found[param].add(stage)
        return found

    def _param_homes(self) -> dict[Value, int]:
        """What rests on the accelerator rests at the first stage that reads it."""
        readers = self._readers(self.stage)
        kinds = {param: self.main.param_role(i).kind for i, param in enumerate(self.main.params)}
        return {param: min(found) for param, found in readers.items() if kinds[param] in ("param", "buffer")}


def _summed_apart(main: Function, assigned: _Assigned) -> Function:
    """`main` with every sum of terms that several stages add up over micro-batches taken after the last of these.

    Legal because adding, and whatever is linear, commutes with summing over micro-batches.
    """
    late: dict[Value, Value] = {}
    same: dict[Value, Value] = {}
    ops: list[Op] = []
    for op in main.ops:
        inputs = list(op.inputs())
        if finishes(op) and inputs[0] in late:
            same[op.results[0]] = late[inputs[0]]
        elif any(value in late for value in inputs) or _adds_stages(op, assigned):
            terms = [
                i
                for i, value in enumerate(inputs)
                if value in late or value.type.layout.state(MICRO_BATCHES) != REPLICATED
            ]
            done = {inputs[i]: _finish(inputs[i], op, ops) for i in terms if inputs[i] not in late} | late
            if not _is_linear(op, terms):
                raise Diagnostic(f"pp cannot pass {op.name}: it reads a sum of several stages before its last term")
            results = tuple(Value(_finished(result), result.name) for result in op.results)
            ops.append(replace(op.with_operands(same | done), results=results))
            late.update(zip(op.results, results, strict=True))
        else:
            ops.append(op.with_operands(same))
    results = tuple(same.get(value, value) for value in main.results)
    return replace(main, ops=tuple(ops), results=results) if late else main


def _adds_stages(op: Op, assigned: _Assigned) -> bool:
    pending = all(value.type.layout.state(MICRO_BATCHES) == PARTIAL for value in op.inputs())
    return op.name == "aten.add.Tensor" and pending and len({assigned.of(value) for value in op.inputs()}) > 1


def _is_linear(op: Op, terms: Sequence[int]) -> bool:
    """Whether the op is linear in these operands together; all others are the same for every micro-batch."""
    return op.name != "call" and frozenset(terms) in rule_of(op).linear


def _finish(value: Value, reader: Op, ops: list[Op]) -> Value:
    done = Value(_finished(value), value.name)
    ops.append(Op(ALL_REDUCE, (value,), (done,), {"axis": MICRO_BATCHES}, reader.loc))
    return done


def _finished(value: Value) -> TensorType:
    return value.type.with_layout(value.type.layout.with_state(MICRO_BATCHES, REPLICATED))


class _Placer:
    """Writes the main function anew, every op at its stage, with sends and clones between stages."""

    def __init__(self, module: Module, main: Function, stages: int) -> None:
        self.assigned = _Assigned(module, main, stages)
        self.main = main
        self.ops: list[Op] = []
        self.params = {param: self._param(param) for param in main.params}
        self.labelled = {label: param for i, param in enumerate(main.params) if (label := main.param_role(i).label)}
        self.there: dict[tuple[Value, int], Value] = {}
        self.made_at: dict[Value, int] = {}

    def run(self) -> Function:
        main = self.main
        for i, op in enumerate(main.ops):
            if i not in self.assigned.floating:
                self._emit(op, self.assigned.stage[i])
        results = tuple(self._result(i, value) for i, value in enumerate(main.results))
        params = tuple(self.params[param] for param in main.params)
        return replace(main, params=params, ops=tuple(self.ops), results=results)

    def _param(self, param: Value) -> Value:
        home = self.assigned.homes.get(param)
        return param if home is None else _at(param, home)

    def _result(self, index: int, value: Value) -> Value:
        """Gradients and updates lie where what they belong to rests."""
        role = self.main.result_role(index)
        owner = self.labelled.get(role.label) if role.kind in ("grad", "update") else None
        homes = [self.assigned.homes.get(each) for each in (owner, value) if each is not None]
        places = [*homes, self.assigned.of(value), self.made_at.get(value), 0]
        return self._at(value, next(place for place in places if place is not None))

    def _emit(self, op: Op, stage: int) -> None:
        """`op` at `stage`, after everything that it reads has been brought there."""
        given = {value: self._at(value, stage) for value in dict.fromkeys(op.inputs())}
        results = tuple(_at(result, stage) for result in op.results)
        self.ops.append(replace(op.with_operands(given), results=results))
        for old, new in zip(op.results, results, strict=True):
            self.there[old, stage] = new
            self.made_at.setdefault(old, stage)

    def _at(self, value: Value, stage: int) -> Value:
        """`value` as it lies at `stage`, sent or made anew where it does not yet."""
        known = self.there.get((value, stage))
        if known is not None:
            return known
        if value in self.params:
            home = self.assigned.homes.get(value)
            return self.params[value] if home is None or home == stage else self._sent(value, home, stage)
        source = self.made_at.get(value)
        index = self.assigned.producer[value]
        if index not in self.assigned.floating or (source is not None and not self._is_cheaper_anew(value, stage)):
            assert source is not None, f"%{value.name} is read before it is made"
            return self._sent(value, source, stage)
        self._emit(self.main.ops[index], stage)
        return self.there[value, stage]

    def _sent(self, value: Value, source: int, stage: int) -> Value:
        here = self.params[value] if value in self.params else self.there[value, source]
        there = self.there[value, stage] = _at(value, stage)
        index = self.assigned.producer.get(value)
        loc = Location() if index is None else self.main.ops[index].loc
        self.ops.append(Op(SEND, (here,), (there,), {"axis": AXIS}, loc))
        return there

    def _is_cheaper_anew(self, value: Value, stage: int) -> bool:
        """Whether making a floating value again touches fewer bytes than sending it does."""
        most = CLONE_FACTOR * value.type.nbytes() + LATENCY_BYTES
        waiting, seen, touched = [value], set[Value](), 0
        while waiting and touched <= most:
            at = waiting.pop()
            if at in seen or (at, stage) in self.there:
                continue
            seen.add(at)
            index = self.assigned.producer.get(at)
            if index is None:
                home = self.assigned.homes.get(at)
                touched += at.type.nbytes() * CLONE_FACTOR if home not in (None, stage) else 0
                continue
            op = self.main.ops[index]
            touched += 0 if kind_of(op) is Kind.VIEW else at.type.nbytes()
            waiting += op.inputs()
        return touched <= most


def _at(value: Value, stage: int) -> Value:
    return Value(value.type.with_layout(value.type.layout.with_owner(AXIS, stage)), value.name)
