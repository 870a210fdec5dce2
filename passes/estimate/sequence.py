"""The order of all instructions of a step, from an excerpt that has three of its micro-batches.

Those between the first micro-batch and the last are alike, so the excerpt has one of them. An instruction of the step
is a position in the excerpt and the number of a micro-batch: no op of the step is made, and no value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from moaic.ir.graph import Op
from moaic.ir.layout import Mesh
from moaic.ir.overlap_schedule import overlapping, places
from moaic.passes.loop_axes import PROLOGUE
from moaic.passes.lowering.programs import Excerpt
from moaic.passes.schedules import Action, Schedule, part_by_part

WHOLE = -1
"""The micro-batch of an instruction that runs once."""

Instruction = tuple[int, int]
"""Position in the excerpt, and micro-batch of the step or WHOLE."""


@dataclass(frozen=True, slots=True)
class Read:
    """An operand made by the instruction at a position of the excerpt: of the reader's micro-batch, or of another."""

    made_by: int
    in_part: bool


@dataclass(frozen=True)
class Instructions:
    """The instructions of a step with `count` micro-batches, and in a pipeline with this schedule."""

    excerpt: Excerpt
    count: int
    schedule: Schedule | None

    @cached_property
    def ops(self) -> Sequence[Op]:
        return self.excerpt.joint.main.ops

    @property
    def mesh(self) -> Mesh:
        return self.excerpt.joint.mesh

    def alike(self, index: int) -> Sequence[int]:
        """The micro-batches of the step for which the instruction at a position stands."""
        return self._alike(self.excerpt.phases[index][0])

    @cached_property
    def parts(self) -> Sequence[int]:
        """By position, the micro-batch in the excerpt, or WHOLE."""
        return [self._part(number) for number, _ in self.excerpt.phases]

    @cached_property
    def reads(self) -> Sequence[Sequence[Read]]:
        """By position, the operands that other instructions make."""
        makers = {result: index for index, op in enumerate(self.ops) for result in op.results}
        return [
            [
                Read(makers[value], self.parts[makers[value]] == self.parts[index])
                for value in op.inputs()
                if value in makers
            ]
            for index, op in enumerate(self.ops)
        ]

    @cached_property
    def workers(self) -> Sequence[frozenset[int]]:
        """By position, the workers along `pp` that run the instruction."""
        all_of_them = frozenset(range(self.mesh.size("pp")))
        owners = [[value.type.layout.owner_on("pp") for value in places(op)] for op in self.ops]
        return [all_of_them if None in each else frozenset(o for o in each if o is not None) for each in owners]

    def of_workers(self, order: Iterable[Instruction]) -> Sequence[Sequence[Instruction]]:
        """By worker along `pp`, those of these instructions that it runs."""
        own: list[list[Instruction]] = [[] for _ in range(self.mesh.size("pp"))]
        for instruction in order:
            for worker in self.workers[instruction[0]]:
                own[worker].append(instruction)
        return own

    def maker(self, read: Read, part: int) -> Instruction:
        """The instruction that makes an operand of an instruction of micro-batch `part`."""
        return read.made_by, part if read.in_part else self._in_step(self.parts[read.made_by])

    def in_order(self) -> Iterator[Instruction]:
        """All instructions, in the order of workers that do not overlap communication with computation."""
        groups = self._groups()
        for number, part in self._phases(groups):
            yield from ((index, WHOLE if self.parts[index] == WHOLE else part) for index in groups.get(number, ()))

    def _groups(self) -> dict[int, list[int]]:
        """Positions by phase; what runs once amid the first micro-batch is where it stands in the excerpt."""
        groups: dict[int, list[int]] = {}
        latest = PROLOGUE
        for index, (number, _) in enumerate(self.excerpt.phases):
            amid = number == PROLOGUE and latest >= 0 and self._part(latest) == 0
            groups.setdefault(latest if amid else number, []).append(index)
            latest = number if number >= 0 else latest
        return groups

    def overlapping(self) -> list[Instruction]:
        """All instructions, in the order of workers that do."""
        return overlapping(
            self.in_order(),
            lambda each: self.ops[each[0]],
            lambda each: {self.maker(read, each[1]) for read in self.reads[each[0]]},
            lambda one, other: not self.workers[one[0]].isdisjoint(self.workers[other[0]]),
        )

    def _phases(self, numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
        """The phases of the excerpt in the order in which the step runs them, each with its micro-batch."""
        if self.schedule is None:
            for number in numbers:
                yield from ((number, part) for part in self._alike(number))
            return
        yield PROLOGUE, WHOLE
        phase_of = {action: number for number, action in enumerate(self._actions)}
        for action in self.schedule.merged:
            yield phase_of[Action(action.kind, action.stage, self._in_excerpt(action.part))], action.part
        yield from ((number, WHOLE) for number in numbers if number < PROLOGUE)

    @cached_property
    def _actions(self) -> Sequence[Action]:
        """Of a pipeline, the action of each phase of the excerpt."""
        assert self.schedule is not None
        whole = self.excerpt.parts == self.count
        return self.schedule.merged if whole else part_by_part(self.schedule, self.excerpt.parts)

    def _part(self, number: int) -> int:
        if number < 0:
            return WHOLE
        return number % self.excerpt.parts if self.schedule is None else self._actions[number].part

    def _alike(self, number: int) -> Sequence[int]:
        """The micro-batches of the step that a phase of the excerpt stands for."""
        part = self._part(number)
        is_middle = 0 < part < self.excerpt.parts - 1 and self.excerpt.parts < self.count
        return range(part, self.count - 1) if is_middle else (self._in_step(part),)

    def _in_step(self, part: int) -> int:
        """The last micro-batch of the step that one of the excerpt stands for."""
        return part if part <= 0 else part + self.count - self.excerpt.parts

    def _in_excerpt(self, part: int) -> int:
        """The micro-batch of the excerpt that stands for one of the step."""
        if part == 0 or self.excerpt.parts == self.count:
            return part
        return self.excerpt.parts - 1 if part == self.count - 1 else self.excerpt.parts - 2
