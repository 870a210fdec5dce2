"""A program's instructions on one rank: what each op of the list does, and which slots it reads, writes and empties."""

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
from moaic.runtime.worker.ring_attention import going_round

Compute = Callable[[list[Tensor]], list[Any]]


class Instruction(NamedTuple):
    """Reads slots, of which it empties those that nobody reads again, and writes slots (-1: nobody reads that result).

    The operands' list is the callee's to empty as it goes.
    """

    run: Compute
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    frees: tuple[int, ...]
    awaits: tuple[int, ...]
    """Slots that hold a collective on its way, which is waited for first."""
    communicates: bool


def instructions(
    main: Function,
    seat: RankContext,
    functions: Mapping[str, Function],
    kernels: Mapping[str, Compute],
    slots: Mapping[Value, int],
) -> Iterator[Instruction]:
    params = set(main.params)
    at = seat.mesh.coordinates(seat.rank)
    landings = RecvBuffers(seat.context.device)
    under_way: set[Value] = set()
    for op, dying in zip(main.ops, last_uses(main), strict=True):
        dead = set(dying)
        held = [value for value in op.inputs() if value.type.layout.holds(at)]
        made = [value for value in op.results if value.type.layout.holds(at)]
        may_overwrite = {value for value in held if value in dead and value not in params}
        run = _compute(op, seat, functions, kernels, landings, may_overwrite)
        begins = _goes_beside(op, seat) and not dead.intersection(made)
        awaited = [value for value in held if value in under_way]
        under_way.difference_update(awaited)
        under_way.update(made if begins else ())
        yield Instruction(
            run=_begun(run, seat) if begins else run,
            reads=tuple(slots[value] for value in held),
            writes=tuple(-1 if value in dead else slots[value] for value in made),
            frees=tuple(slots[value] for value in held if value in dead),
            awaits=tuple(slots[value] for value in dict.fromkeys(awaited)),
            communicates=is_communication(op),
        )


def is_communication(op: Op) -> bool:
    """Whether an instruction exchanges data with other ranks."""
    return op.name == SEND or op.name in COLLECTIVES


def _compute(
    op: Op,
    seat: RankContext,
    functions: Mapping[str, Function],
    kernels: Mapping[str, Compute],
    landings: RecvBuffers,
    may_overwrite: set[Value],
) -> Compute:
    if op.name == "call":
        return _called(op, functions[op.callee], kernels[op.callee], seat, may_overwrite)
    if op.name == ALL_REDUCE and len(op.results) > 1:
        return _bundle(op, seat, may_overwrite)
    if op.name in COLLECTIVES:
        return _collective(op, seat, may_overwrite)
    if is_ring(op):
        return going_round(op, seat)
    if op.name == SEND:
        return _send(op, seat, landings)
    maker = _IN_TIME.get(op.name)
    if maker is None:
        raise ValueError(f"a program cannot contain {op.name}: only calls, collectives, rings and steps in time")
    return maker(op, seat, may_overwrite)


def _called(op: Op, function: Function, kernel: Compute, seat: RankContext, may_overwrite: set[Value]) -> Compute:
    """Supplies the rank's coordinates that a function asks for after its own parameters, and sums that are its own."""
    roles = [function.param_role(index) for index in range(len(function.params))]
    taken_in = seat.context.backend.to_device
    coordinates = [seat.index(role.label) for role in roles if role.kind == "coordinate"]
    at = [taken_in(torch.tensor(index, dtype=torch.int64)) for index in coordinates]
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


def _goes_beside(op: Op, seat: RankContext) -> bool:
    """Whether an instruction communicates, on a device that computes meanwhile."""
    return op.name in COMMUNICATING and seat.transport.is_asynchronous and seat.mesh.size(str(op.attrs["axis"])) > 1


def _begun(run: Compute, seat: RankContext) -> Compute:
    """An instruction that is only begun: each of its results is called when it is wanted."""

    def begin(inputs: list[Tensor]) -> list[Any]:
        count = len(inputs)
        ended = seat.context.backend.run_async(run, inputs)
        return [partial(_item, ended, index) for index in range(count)]

    return begin


def _item(ended: Callable[[], list[Any]], index: int) -> Any:
    return ended()[index]


def _collective(op: Op, seat: RankContext, may_overwrite: set[Value]) -> Compute:
    (operand,), (result,) = tuple(op.inputs()), op.results
    axis = op.attrs["axis"]
    assert isinstance(axis, str)
    step = move(seat, axis, operand.type.layout, result.type.layout, in_place=operand in may_overwrite)
    return lambda inputs: [step(inputs.pop())]


def _bundle(op: Op, seat: RankContext, may_overwrite: set[Value]) -> Compute:
    """Sums of equal groups and element type, of which there are several, in one."""
    axis = op.attrs["axis"]
    assert isinstance(axis, str)
    group, free = seat.group(axis), [value in may_overwrite for value in op.inputs()]

    def run(inputs: list[Tensor]) -> list[Tensor]:
        results = [owned(tensor, may and tensor.is_contiguous()) for tensor, may in zip(inputs, free, strict=True)]
        flat = torch.cat([tensor.view(-1) for tensor in results])
        seat.transport.all_reduce(flat, group)
        torch.ops.aten._foreach_copy_(results, _unpacked(flat, results))
        return results

    return run


def _unpacked(flat: Any, like: Sequence[Tensor]) -> list[Tensor]:
    """The parts of a flat tensor, of the shapes of `like`."""
    parts: Sequence[Tensor] = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _send(op: Op, seat: RankContext, landings: RecvBuffers) -> Compute:
    """On one rank the sending, on another the receiving."""
    (operand,), (result,) = tuple(op.inputs()), op.results
    axis = op.attrs["axis"]
    assert isinstance(axis, str)
    at, homes = seat.mesh.coordinates(seat.rank), [value.type.layout.owner_on(axis) for value in (operand, result)]
    ranks = [seat.mesh.rank({**at, axis: home}) for home in homes if home is not None]
    group, shape, dtype = Group.of(ranks, seat.rank), result.type.local_shape(seat.mesh), DTYPES[result.type.dtype]

    def send(inputs: list[Tensor]) -> list[Tensor]:
        seat.transport.broadcast(inputs.pop(), group)
        return []

    def receive(inputs: list[Tensor]) -> list[Tensor]:
        out = landings.take(shape, dtype)
        seat.transport.broadcast(out, group)
        return [out]

    return send if group.index == 0 else receive


def _part(op: Op, seat: RankContext, may_overwrite: set[Value]) -> Compute:
    dim, stride, count, index = (attr_int(op, name) for name in ("dim", "stride", "count", "index"))
    return lambda inputs: [cut(inputs[0], dim, stride, count, index)]


def _join(op: Op, seat: RankContext, may_overwrite: set[Value]) -> Compute:
    dim, stride = attr_int(op, "dim"), attr_int(op, "stride")
    return lambda inputs: [join(inputs, dim, stride)]


def _accumulate(op: Op, seat: RankContext, may_overwrite: set[Value]) -> Compute:
    """The sum so far, if there is one, and one part more, added in the wider of their types; zeros where both lack."""
    values = list(op.inputs())
    dtype = DTYPES[op.results[0].type.dtype]
    if not values:
        shape, device = op.results[0].type.local_shape(seat.mesh), seat.context.device
        return lambda inputs: [torch.zeros(shape, dtype=dtype, device=device)]
    in_place = values[0] in may_overwrite

    def run(inputs: list[Tensor]) -> list[Tensor]:
        first, *rest = inputs
        total = owned(first, in_place)
        if rest:
            total.add_(rest[0])
        return [total.to(dtype)]

    return run


_IN_TIME: Final[Mapping[str, Callable[[Op, RankContext, set[Value]], Compute]]] = {
    PART: _part,
    JOIN: _join,
    ACCUMULATE: _accumulate,
}
