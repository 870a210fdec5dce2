"""A program's instructions on one rank: for each op a callable, and the slots that it reads, writes and frees."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from moaic.ir.accumulation import overwritten
from moaic.ir.collectives import COLLECTIVES, COMMUNICATING
from moaic.ir.graph import Function, Op, Value
from moaic.ir.op_names import ACCUMULATE, ALL_REDUCE, JOIN, PART, SEND
from moaic.ir.ops import attr_int
from moaic.ir.ring_attention import is_ring
from moaic.runtime.codegen.lower_to_fx import last_uses
from moaic.runtime.comm.reshard import RankContext, move, owned
from moaic.runtime.comm.transport import Group
from moaic.runtime.dtypes import DTYPES
from moaic.runtime.protocol.tensor_parts import cut, join
from moaic.runtime.worker.recv_buffers import RecvBuffers
from moaic.runtime.worker.ring_attention import ring_attention

Compute = Callable[[list[Tensor]], list[Any]]


class Instruction(NamedTuple):
    """One instruction: a callable and its slots. -1 in `writes` is a result without uses.

    `run` may empty the list of its operands, so that each is freed after its last use.
    """

    run: Compute
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    frees: tuple[int, ...]
    """Operands of which this is the last use."""
    awaits: tuple[int, ...]
    """Slots that hold a running collective, which is awaited before `run`."""
    communicates: bool
    is_async: bool = False
    """Whether it runs on the side stream: its results are awaited."""


def instructions(
    main: Function,
    rank_context: RankContext,
    functions: Mapping[str, Function],
    kernels: Mapping[str, Compute],
    slots: Mapping[Value, int],
) -> Iterator[Instruction]:
    """The instructions of the ops of `main`, in order. `kernels` are the compiled `functions`, by name."""
    params = set(main.params)
    at = rank_context.mesh.coordinates(rank_context.rank)
    recv_buffers = RecvBuffers(rank_context.context.device)
    running: set[Value] = set()
    for op, dying in zip(main.ops, last_uses(main), strict=True):
        dead = set(dying)
        held = [value for value in op.inputs() if value.type.layout.holds(at)]
        made = [value for value in op.results if value.type.layout.holds(at)]
        may_overwrite = {value for value in held if value in dead and value not in params}
        run = _compute(op, rank_context, functions, kernels, recv_buffers, may_overwrite)
        is_async = _runs_async(op, rank_context) and not dead.intersection(made)
        awaited = [value for value in held if value in running]
        running.difference_update(awaited)
        running.update(made if is_async else ())
        yield Instruction(
            run=_async(run, rank_context) if is_async else run,
            reads=tuple(slots[value] for value in held),
            writes=tuple(-1 if value in dead else slots[value] for value in made),
            frees=tuple(slots[value] for value in held if value in dead),
            awaits=tuple(slots[value] for value in dict.fromkeys(awaited)),
            communicates=is_communication(op),
            is_async=is_async,
        )


def is_communication(op: Op) -> bool:
    """Whether an instruction exchanges data with other ranks."""
    return op.name == SEND or op.name in COLLECTIVES


def _compute(
    op: Op,
    rank_context: RankContext,
    functions: Mapping[str, Function],
    kernels: Mapping[str, Compute],
    recv_buffers: RecvBuffers,
    may_overwrite: set[Value],
) -> Compute:
    if op.name == "call":
        return _called(op, functions[op.callee], kernels[op.callee], rank_context, may_overwrite)
    if op.name == ALL_REDUCE and len(op.results) > 1:
        return _bucket(op, rank_context, may_overwrite)
    if op.name in COLLECTIVES:
        return _collective(op, rank_context, may_overwrite)
    if is_ring(op):
        return ring_attention(op, rank_context)
    if op.name == SEND:
        return _send(op, rank_context, recv_buffers)
    maker = _LOOP_OPS.get(op.name)
    if maker is None:
        raise ValueError(f"a program cannot contain {op.name}: only calls, collectives, ring attention and loop ops")
    return maker(op, rank_context, may_overwrite)


def _called(
    op: Op, function: Function, kernel: Compute, rank_context: RankContext, may_overwrite: set[Value]
) -> Compute:
    """A call: appends the coordinates that the function takes, and copies sums that it must not overwrite."""
    roles = [function.param_role(index) for index in range(len(function.params))]
    to_device = rank_context.context.backend.to_device
    coordinates = [rank_context.index(role.label) for role in roles if role.kind == "coordinate"]
    at = [to_device(torch.tensor(index, dtype=torch.int64)) for index in coordinates]
    given = list(op.inputs())
    sums = [(position, given[position] in may_overwrite) for position in overwritten(function)]
    if not at and not sums:
        return kernel

    def run(inputs: list[Tensor]) -> list[Tensor]:
        for position, free in sums:
            inputs[position] = owned(inputs[position], free)
        inputs += at
        return kernel(inputs)

    return run


def _runs_async(op: Op, rank_context: RankContext) -> bool:
    """Whether an instruction is a collective that runs while the device computes."""
    return (
        op.name in COMMUNICATING
        and rank_context.transport.is_asynchronous
        and rank_context.mesh.size(str(op.attrs["axis"])) > 1
    )


def _async(run: Compute, rank_context: RankContext) -> Compute:
    """An asynchronous instruction: each of its results is a function that waits and returns the tensor."""

    def begin(inputs: list[Tensor]) -> list[Any]:
        count = len(inputs)
        wait = rank_context.context.backend.run_async(run, inputs)
        return [partial(_item, wait, index) for index in range(count)]

    return begin


def _item(wait: Callable[[], list[Any]], index: int) -> Any:
    return wait()[index]


def _collective(op: Op, rank_context: RankContext, may_overwrite: set[Value]) -> Compute:
    (operand,), (result,) = tuple(op.inputs()), op.results
    axis = op.attrs["axis"]
    assert isinstance(axis, str)
    layouts = operand.type.layout, result.type.layout
    step = move(rank_context, axis, result.type.shape, *layouts, in_place=operand in may_overwrite)
    return lambda inputs: [step(inputs.pop())]


def _bucket(op: Op, rank_context: RankContext, may_overwrite: set[Value]) -> Compute:
    """An all-reduce of several tensors of one group and element type, as one collective."""
    axis = op.attrs["axis"]
    assert isinstance(axis, str)
    group, is_free = rank_context.group(axis), [value in may_overwrite for value in op.inputs()]

    def run(inputs: list[Tensor]) -> list[Tensor]:
        results = [owned(tensor, free and tensor.is_contiguous()) for tensor, free in zip(inputs, is_free, strict=True)]
        flat = torch.cat([tensor.view(-1) for tensor in results])
        rank_context.transport.all_reduce(flat, group)
        torch.ops.aten._foreach_copy_(results, _unpacked(flat, results))
        return results

    return run


def _unpacked(flat: Any, like: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a flat tensor, in the shapes of `like`."""
    parts: Sequence[Tensor] = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _send(op: Op, rank_context: RankContext, recv_buffers: RecvBuffers) -> Compute:
    """A send between pipeline stages: sends on the owner of the operand, receives on the owner of the result."""
    (operand,), (result,) = tuple(op.inputs()), op.results
    axis = op.attrs["axis"]
    assert isinstance(axis, str)
    at = rank_context.mesh.coordinates(rank_context.rank)
    owners = [value.type.layout.owner_on(axis) for value in (operand, result)]
    ranks = [rank_context.mesh.rank({**at, axis: owner}) for owner in owners if owner is not None]
    group, shape = Group.of(ranks, rank_context.rank), result.type.local_shape(rank_context.mesh)
    dtype = DTYPES[result.type.dtype]

    def send(inputs: list[Tensor]) -> list[Tensor]:
        rank_context.transport.broadcast(inputs.pop(), group)
        return []

    def receive(inputs: list[Tensor]) -> list[Tensor]:
        out = recv_buffers.take(shape, dtype)
        rank_context.transport.broadcast(out, group)
        return [out]

    return send if group.index == 0 else receive


def _part(op: Op, rank_context: RankContext, may_overwrite: set[Value]) -> Compute:
    dim, stride, count, index = (attr_int(op, name) for name in ("dim", "stride", "count", "index"))
    return lambda inputs: [cut(inputs[0], dim, stride, count, index)]


def _join(op: Op, rank_context: RankContext, may_overwrite: set[Value]) -> Compute:
    dim, stride = attr_int(op, "dim"), attr_int(op, "stride")
    return lambda inputs: [join(inputs, dim, stride)]


def _accumulate(op: Op, rank_context: RankContext, may_overwrite: set[Value]) -> Compute:
    """Adds a part to the running sum in the wider of their types; without operands the sum is zeros."""
    values = list(op.inputs())
    dtype = DTYPES[op.results[0].type.dtype]
    if not values:
        shape, device = op.results[0].type.local_shape(rank_context.mesh), rank_context.context.device
        return lambda inputs: [torch.zeros(shape, dtype=dtype, device=device)]
    in_place = values[0] in may_overwrite

    def run(inputs: list[Tensor]) -> list[Tensor]:
        first, *rest = inputs
        total = owned(first, in_place)
        if rest:
            total.add_(rest[0])
        return [total.to(dtype)]

    return run


_LOOP_OPS: Final[Mapping[str, Callable[[Op, RankContext, set[Value]], Compute]]] = {
    PART: _part,
    JOIN: _join,
    ACCUMULATE: _accumulate,
}
