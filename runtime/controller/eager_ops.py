"""Eager ops: placements are decided once per kind of call, the op is defined on the workers, then called by number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from moaic.runtime.controller.buffer import Buffer
from moaic.runtime.controller.buffers import Buffers
from moaic.runtime.controller.eager_call import EagerCall
from moaic.runtime.controller.eager_placement import (
    PlacedOperand,
    decide,
    fewer_replicas,
    initial_placements,
    operands,
    serves,
)
from moaic.runtime.protocol.commands import Define, Forget, Free, Operate, Reshard
from moaic.runtime.protocol.conversion import Resharding
from moaic.runtime.protocol.operation import Operation
from moaic.runtime.protocol.placement import Placement

_NOWHERE: Final = id(None)
"""The `id` of the placement of a buffer that no worker holds."""

MOST_PREPARED: Final = 10_000
"""Eager ops that are remembered; one more clears them all."""


Together = tuple[tuple[int, int], ...]
"""Index of the operand and number of each resharding of one command, which the same ranks run."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """An eager op with its decided placements, defined on the workers."""

    number: int
    outputs: tuple[Placement, ...]
    moved: tuple[Together, ...]
    """Operands that are resharded before the op."""
    returned: tuple[Together, ...]
    """Written operands whose new values are resharded back after the op."""
    settling: tuple[tuple[int, Placement], ...]
    """Index and placement of replicated operands that the op may overwrite by shards, or on fewer ranks, for good."""
    places: tuple[Placement | None, ...]
    """The operands' placements: the cache key holds their ids, which stay unique while the placements live."""


class EagerOps:
    """Launches eager ops, and caches the decisions for each kind of call."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._pool = buffers.pool
        self._lines = buffers.lines
        self._prepared: dict[Any, Prepared] = {}
        self._operations: dict[Operation, int] = {}

    def name(self, number: int) -> str:
        """The name of the op defined with this number."""
        return next((operation.op for operation, known in self._operations.items() if known == number), "an op")

    def launch(self, call: EagerCall, outputs: Sequence[Buffer]) -> None:
        prepared = self._prepared_for(call)
        if prepared.settling and self._settle(call, prepared):
            prepared = self._prepared_for(call)
        ids = [buffer.id for buffer in call.buffers]
        line = self._lines.here()
        temporary = self._gather(ids, prepared, line) if prepared.moved else ()
        self._pool.push(Operate(line, prepared.number, ids, call.scalars, [buffer.id for buffer in outputs]))
        for together in prepared.returned:
            moves = [(resharding, ids[index], call.buffers[index].id) for index, resharding in together]
            self._pool.push(Reshard(line, moves))
        if temporary:
            self._pool.push(Free(line, temporary))
        for buffer, place in zip(outputs, prepared.outputs, strict=False):
            buffer.place, buffer.host, buffer.fill = place, None, None

    def _prepared_for(self, call: EagerCall) -> Prepared:
        """The op for the placements that the operands have now; operands that no worker holds yet get one."""
        places = [id(buffer.place) for buffer in call.buffers]
        if _NOWHERE in places:
            self._materialize_all(call)
            places = [id(buffer.place) for buffer in call.buffers]
        key = (call.form, *places, *call.offsets)
        prepared = self._prepared.get(key)
        if prepared is None:
            self._forget_if_many()
            prepared = self._prepared[key] = self._prepare(call)
        return prepared

    def _forget_if_many(self) -> None:
        """Forget all eager ops once there are too many: a loop over slices makes a new one at each iteration."""
        if len(self._prepared) >= MOST_PREPARED:
            self._prepared.clear()
            self._operations.clear()
            self._pool.push(Forget(-1))

    def _gather(self, ids: list[int], prepared: Prepared, line: int) -> list[int]:
        """Reshard operands into temporary buffers, one per buffer and resharding; return the ids of these."""
        temporary: dict[tuple[int, int], int] = {}
        for together in prepared.moved:
            moves: list[tuple[int, int, int]] = []
            for index, resharding in together:
                source = ids[index]
                target = temporary.get((source, resharding))
                if target is None:
                    target = temporary[source, resharding] = self._buffers.new_id()
                    moves.append((resharding, source, target))
                ids[index] = target
            if moves:
                self._pool.push(Reshard(line, moves))
        return list(temporary.values())

    def _settle(self, call: EagerCall, prepared: Prepared) -> bool:
        """Place operands that the op overwrites as the others are, unless programs need them where they are.

        Optimizer state begins as zeros, whole on every worker, and meets the first gradient in such an op: a sharded
        one, or one of a plan that uses fewer workers. True if any operand has a new placement.
        """
        settled = False
        for index, place in prepared.settling:
            buffer = call.buffers[index]
            if not buffer.rests and buffer.place is prepared.places[index]:
                self._buffers.reshard_in_place(buffer, place)
                settled = True
        return settled

    def _materialize_all(self, call: EagerCall) -> None:
        """Place the operands that no worker holds yet as the op needs them."""
        places = initial_placements(call.form.op, operands(call), self._pool.size)
        for buffer, place in zip(call.buffers, places, strict=True):
            if place is not None and buffer.place is None:
                self._buffers.materialize(buffer, place)

    def _prepare(self, call: EagerCall) -> Prepared:
        form, given = call.form, operands(call)
        decision = decide(form, given, self._pool.size)
        moved = _Groups(self._buffers)
        returned = _Groups(self._buffers)
        settling: list[tuple[int, Placement]] = []
        for index, (operand, needed) in enumerate(zip(given, decision.required, strict=True)):
            place = operand.place
            assert place is not None
            is_readable = serves(place, needed)
            if not is_readable:
                moved.add(index, operand, place, needed)
            # The op writes a temporary copy, or not all replicas: the new value goes back to the buffer's placement.
            if operand.written and not (is_readable and set(needed.holders) == set(place.holders)):
                returned.add(index, operand, needed, place)
                if operand.geometry is None and place.is_uncut and not is_readable:
                    settling.append((index, needed))
            elif operand.written and (fewer := fewer_replicas(operand, given)) is not None:
                settling.append((index, fewer))
        geometries = tuple(operand.geometry for operand in given)
        combination = decision.combination
        ranks = tuple(place.holders for place in decision.required) if combination is None else combination.owners
        kwargs = (*form.kwargs, *decision.kwargs)
        operation = Operation(form.op, form.args, kwargs, geometries, ranks, combination, form.default_dtype)
        number = self._defined(operation)
        outputs = tuple(self._buffers.interned(place) for place in decision.outputs)
        places = tuple(operand.place for operand in given)
        return Prepared(number, outputs, moved.all(), returned.all(), tuple(settling), places)

    def _defined(self, operation: Operation) -> int:
        number = self._operations.get(operation)
        if number is None:
            number = self._operations[operation] = len(self._operations)
            self._pool.push(Define(self._lines.here(), number, operation.encoded()))
        return number


class _Groups:
    """Reshardings by the ranks that run them together, so that one command has all of a group."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._groups: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    def add(self, index: int, operand: PlacedOperand, before: Placement, after: Placement) -> None:
        resharding = Resharding(operand.dtype, operand.buffer_shape, before, after)
        number = self._buffers.resharding(resharding)
        self._groups.setdefault(resharding.participants, []).append((index, number))

    def all(self) -> tuple[Together, ...]:
        return tuple(tuple(group) for group in self._groups.values())
