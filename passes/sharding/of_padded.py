"""Plans that pad the batch are those of another step: one with more rows, made once for each number of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.ir.verify import check_made
from moaic.passes.config import Config
from moaic.passes.sharding.data_parallel import batch_size, padded_rows
from moaic.passes.sharding.pad_batch import PadBatch, pad_batch

T = TypeVar("T")


class OfPadded(Generic[T]):
    """What is made of padded steps, in place of that made of the step, where the batch does not divide."""

    def __init__(self, step: Module, make: Callable[[Module], T]) -> None:
        self._step = step
        self._rows = batch_size(step.main)
        self._make = make
        self._made: dict[int, T | Diagnostic] = {}

    def instead(self, config: Config) -> T | None:
        """What is made of the step with the rows that `config` needs; None where the batch divides.

        Raises Diagnostic where it cannot be padded.
        """
        parts = config.dp * config.micro_batches
        if self._rows % parts == 0:
            return None
        rows = padded_rows(self._rows, parts)
        if rows not in self._made:
            try:
                self._made[rows] = self._make(check_made(pad_batch(self._step, rows), PadBatch.name))
            except Diagnostic as reason:
                self._made[rows] = reason
        made = self._made[rows]
        if isinstance(made, Diagnostic):
            raise made
        return made
