"""Assign the ops of a micro-batch to the actions of a pipeline schedule, and the stages to workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache

from moaic.ir.backward_slice import backward_slice
from moaic.ir.graph import Function, Op, Value
from moaic.ir.layout import Mesh
from moaic.ir.op_names import SEND
from moaic.ir.ops import Kind, kind_of
from moaic.ir.types import TensorType
from moaic.passes.loop_axes import Phase, Unrolled
from moaic.passes.pipeline.assign_stages import AXIS
from moaic.passes.schedules import Schedule
from moaic.passes.transforms.dce import needed_forward

Groups = Mapping[tuple[str, int], Sequence[Op]]
"""Ops in order, by kind of action (F, B or W) and stage."""


def actions_of(main: Function, body: Sequence[Op], chunked: Collection[Op], *, splits_backward: bool) -> Groups:
    """The ops of `body` by action; a send belongs to its sender.

    `chunked` ops, gradients too, belong to the forward: otherwise all chunks would be live until the backward.
    """
    forward = _forward(main, body, chunked)
    weights = _weights(main, body, forward) if splits_backward else set[Op]()
    groups: dict[tuple[str, int], list[Op]] = defaultdict(list)
    for op in body:
        kind = "F" if op in forward else "W" if op in weights else "B"
        groups[kind, _stage(op)].append(op)
    return groups


def _stage(op: Op) -> int:
    """The stage that runs an op."""
    value = next(op.inputs()) if op.name == SEND else op.results[0]
    stage = value.type.layout.owner_on(AXIS)
    assert stage is not None, f"{op.name} has no stage"
    return stage


def _forward(main: Function, body: Sequence[Op], chunked: Collection[Op]) -> set[Op]:
    """The ops that outputs depend on, and those that sends to higher stages and chunked ops depend on."""
    forward = {main.ops[i] for i in needed_forward(main)}
    makers = {result: op for op in body for result in op.results}
    early: set[Op] = set()
    for op in body:
        sources = (makers[value] for value in op.inputs() if value in makers)
        if op in forward or all(source in forward or source in early for source in sources):
            early.add(op)
    rising = {op for op in early if op.name == SEND and _stage(op) < (op.results[0].type.layout.owner_on(AXIS) or 0)}
    wanted = [value for op in early if op in rising or op in chunked for value in op.results]
    return forward | ({main.ops[i] for i in backward_slice(main, wanted)} & early)


def _weights(main: Function, body: Sequence[Op], forward: set[Op]) -> set[Op]:
    """Ops of the backward on which only sums over micro-batches depend.

    A heavy op that another heavy op depends on is left out: it is on the path to other layers.
    """
    readers: dict[Value, set[Op]] = defaultdict(set)
    for op in main.ops:
        for value in op.inputs():
            readers[value].add(op)
    inside, weights = set(body), set[Op]()
    for op in reversed(body):
        if op in forward or op.name == SEND:
            continue
        here = {reader for result in op.results for reader in readers[result]}
        in_body = here & inside
        light = all(kind_of(reader) is not Kind.HEAVY and reader.name != "call" for reader in in_body)
        if in_body <= weights and (light or (kind_of(op) is not Kind.HEAVY and op.name != "call")):
            weights.add(op)
    return weights


def signature_on_workers(main: Function, schedule: Schedule) -> Function:
    """`main` without its ops, its parameters and results owned by the workers that run their stages."""
    same = {value: _on_worker(value, schedule) for value in (*main.params, *main.results)}
    params, results = tuple(same[value] for value in main.params), tuple(same[value] for value in main.results)
    return replace(main, params=params, ops=(), results=results)


def _on_worker(value: Value, schedule: Schedule) -> Value:
    return Value(_type_on_worker(value.type, schedule), value.name)


def _type_on_worker(tensor: TensorType, schedule: Schedule) -> TensorType:
    stage = tensor.layout.owner_on(AXIS)
    return tensor if stage is None else tensor.with_layout(tensor.layout.with_owner(AXIS, schedule.owners[stage]))


def on_workers(unrolled: Unrolled, schedule: Schedule) -> Unrolled:
    """`unrolled` with workers as owners instead of stages; sends between stages of one worker are dropped."""
    moved: dict[Value, Value] = {}
    ops: list[Op] = []
    phases: list[Phase] = []

    @cache
    def type_on_worker(tensor: TensorType) -> TensorType:
        return _type_on_worker(tensor, schedule)

    def placed(value: Value) -> Value:
        if value not in moved:
            moved[value] = Value(type_on_worker(value.type), value.name)
        return moved[value]

    function = unrolled.function
    params = tuple(map(placed, function.params))
    for op, phase in zip(function.ops, unrolled.phases, strict=True):
        if op.name == SEND:
            (source,), (target,) = tuple(op.inputs()), op.results
            if placed(source).type.layout.owner == placed(target).type.layout.owner:
                moved[target] = moved[source]
                continue
        results = tuple(map(placed, op.results))
        ops.append(replace(op.with_operands(moved), results=results))
        phases.append(phase)
    function = replace(function, params=params, ops=tuple(ops), results=tuple(map(placed, function.results)))
    axes = tuple((axis, len(schedule.workers) if axis == AXIS else size) for axis, size in unrolled.mesh.axes)
    return Unrolled(function, Mesh(axes), tuple(phases))
