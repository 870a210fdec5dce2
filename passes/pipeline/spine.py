"""The ops of a forward that the stages of a pipeline share out, and where they are cut."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Function, Module, Value
from moaic.ir.ops import Kind, kind_of
from moaic.passes.loop_axes import combines_parts
from moaic.passes.pipeline.balanced_partition import balanced_partition
from moaic.passes.pipeline.inline_layers import cost_of
from moaic.passes.transforms.dce import needed_forward
from moaic.text.units import count


class Spine:
    """The ops of the forward of a main function, those left out that every stage computes for itself."""

    def __init__(self, module: Module, main: Function) -> None:
        self.module = module
        self.main = main
        self.producer = {result: i for i, op in enumerate(main.ops) for result in op.results}
        self.floating = self._floating()
        self.forward = needed_forward(main)
        self.positions = [i for i in sorted(self.forward) if i not in self.floating]

    @cached_property
    def costs(self) -> Sequence[float]:
        """The cost of each op in the balance between stages."""
        return [cost_of(self.module, self.main.ops[i]) for i in self.positions]

    def cut(self, shares: Sequence[int]) -> dict[int, int]:
        """By position in the main function, the stage of each op, where stages have these shares of the work.

        Raises Diagnostic where there are too few ops.
        """
        if (stages := len(shares)) > len(self.positions):
            ops = count(len(self.positions), "op")
            raise Diagnostic(f"pp={stages} needs {stages} stages, and the forward has {ops} to share out")
        found = balanced_partition(self.costs, self._crossing(), shares)
        return dict(zip(self.positions, found, strict=True))

    def _floating(self) -> set[int]:
        floating: set[int] = set()
        for i, op in enumerate(self.main.ops):
            cheap = op.name != "call" and kind_of(op) is not Kind.HEAVY and not combines_parts(op)
            if cheap and all(value not in self.producer or self.producer[value] in floating for value in op.inputs()):
                floating.add(i)
        return floating

    def _crossing(self) -> list[int]:
        """For each position of the spine but the first, the bytes that cross a boundary before it."""
        position = {i: number for number, i in enumerate(self.positions)}
        change = [0] * (len(self.positions) + 1)
        last: dict[Value, int] = {}
        for number, i in enumerate(self.positions):
            inputs = self.main.ops[i].inputs()
            last.update((value, number) for value in inputs if self.producer.get(value, -1) in position)
        for value, end in last.items():
            change[position[self.producer[value]] + 1] += value.type.nbytes()
            change[end + 1] -= value.type.nbytes()
        crossing: list[int] = []
        live = 0
        for number in range(1, len(self.positions)):
            live += change[number]
            crossing.append(live)
        return crossing
