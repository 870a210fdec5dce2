"""Bytes that every worker holds, instruction by instruction, of a step whose instructions are those of an excerpt."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from moaic.ir.graph import Op
from moaic.passes.estimate.memory import FusedFunctions, Persistent, bytes_of, changes
from moaic.passes.estimate.per_rank import of_rank, owner_coordinates
from moaic.passes.estimate.sequence import WHOLE, Instruction, Instructions
from moaic.passes.lowering.plan import Plan
from moaic.passes.transforms.outline import layer_of

Profile = Sequence[tuple[Hashable, int]]
"""Of every instruction that needs memory, in order, its kind and the most bytes that are live while it runs."""


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one worker."""

    parameters: int
    gradients: int
    optimizer: int
    before: int
    """Live before the first instruction."""
    between: int
    """The most that is live where one micro-batch follows another: no activations, but what all of them share."""
    profile: Profile


def held_by(step: Instructions, order: Sequence[Instruction], plan: Plan, fused: FusedFunctions) -> list[Held]:
    """Bytes of every worker along `pp`."""
    of_workers = step.of_workers(order)
    return [
        Liveness(step, plan, coords, fused).held(of_workers[coords.get("pp", 0)])
        for coords in owner_coordinates(step.mesh)
    ]


class Liveness:
    """The bytes that are live on the ranks at these coordinates, instruction by instruction."""

    def __init__(self, step: Instructions, plan: Plan, coords: dict[str, int], fused: FusedFunctions) -> None:
        self.step = step
        self.fused = fused
        self.persistent = Persistent.of(plan, coords)
        worker = coords.get("pp", 0)
        self.own = [index for index, workers in enumerate(step.workers) if worker in workers]
        main = step.excerpt.joint.main
        self.main = of_rank(replace(main, ops=tuple(main.ops[index] for index in self.own)), coords)

    def held(self, order: Sequence[Instruction]) -> Held:
        """The bytes over these instructions, all of which this worker runs."""
        mesh = self.step.mesh
        live = before = bytes_of(self.main.params, mesh) + self.persistent.beside(self.step.excerpt.joint_params)
        most, grown = self._changes()
        between, latest = 0, WHOLE
        peaks = dict.fromkeys(self.own, 0)
        for index, part in order:
            if part not in (WHOLE, latest):
                between, latest = max(between, live), part
            peaks[index] = max(peaks[index], live + most[index])
            live += grown[index]
        gradients = sum(each.gradient.local_nbytes(mesh) for each in self.persistent.trained)
        parameters = bytes_of(self.persistent.values.values(), mesh)
        profile = [(_kind(self.step.ops[index]), peaks[index]) for index in self.own if most[index]]
        return Held(parameters, gradients, self.persistent.state, before, between, profile)

    def _changes(self) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """By position, the need of an instruction beyond what is live, and what is live more after it."""
        makers = {value: index for index, op in zip(self.own, self.main.ops, strict=True) for value in op.results}
        most: dict[int, int] = {}
        grown: dict[int, int] = {}
        for index, change in zip(self.own, changes(self.main, self.step.excerpt.joint, self.fused), strict=True):
            most[index] = change.most
            freed = sum(
                self._deaths(makers.get(value, index), index) * value.type.local_nbytes(self.step.mesh)
                for value in change.dying
            )
            grown[index] = change.made - freed
        return most, grown

    def _deaths(self, maker: int, reader: int) -> int:
        """How many values of the step die where one of the excerpt does."""
        parts = self.step.parts
        return len(self.step.alike(maker)) if parts[reader] == WHOLE != parts[maker] else 1


def _kind(op: Op) -> Hashable:
    """What instructions of two sketches have in common that stand at the same place.

    One function may make something of each layer, such as the casts of parameters: the more layers, the more results.
    """
    layer = layer_of(op.loc.module)
    place = op.loc.module if layer is None else layer[0]
    return op.name, place, op.loc.side, frozenset(result.type for result in op.results)
