"""What a worker keeps of commands that failed, so that an error costs what its command would have made and no more.

A failed command's results are *spoilt*: whoever reads one is given the number of that command, and what is made of
spoilt values is spoilt. From the first failure until the person is told nothing is written that was there before, as
none of their later lines would have run had it been raised at its own: such writes are *withheld*, and until then
those buffers read as spoilt, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Final

import torch
from torch import Tensor

from moaic.runtime.comm.shm_slots import PeerLost


class Spoilt(Exception):
    """A command needs what the command of that number failed to make, here or on a worker that it meets."""

    def __init__(self, root: int) -> None:
        super().__init__(root)
        self.root = root


LASTING: Final = (PeerLost, *(kind for kind in [getattr(torch, "AcceleratorError", None)] if kind is not None))
"""Errors after which a worker is of no more use: its peer is gone, or its GPU does nothing any more."""


class Trouble:
    """The spoilt and withheld buffers of one worker's table."""

    def __init__(self, table: dict[int, Tensor]) -> None:
        self._table = table
        self._spoilt: dict[int, int] = {}
        self._withheld: dict[int, int] = {}
        self._born: set[int] = set()
        self._first: int | None = None
        self._due: int | None = None
        self.is_on = False
        """Whether anything below can be so: all that the fast path asks."""

    @property
    def first(self) -> int | None:
        """The first command that failed since the person was last told."""
        return self._first

    def is_spoilt(self, buffer_id: int) -> bool:
        return buffer_id in self._spoilt

    def root_of(self, reads: Iterable[int]) -> int | None:
        """The failed command for which one of these buffers has no value to be read."""
        for buffer_id in reads:
            if (root := self._spoilt.get(buffer_id)) is not None:
                return root
            if buffer_id in self._withheld:
                return self._first
        return None

    def check(self, reads: Iterable[int]) -> None:
        """Raises Spoilt, too, for a failed command that makes nothing, and so can be told of at any reading."""
        if (root := self.root_of(reads)) is not None or (root := self._due) is not None:
            raise Spoilt(root)

    def withholds(self, writes: Iterable[int]) -> bool:
        """Whether one of these was there before the first failure."""
        return self._first is not None and any(each in self._table and each not in self._born for each in writes)

    def keep_out(self, root: int, number: int, makes: Collection[int], writes: Collection[int], *, began: bool) -> None:
        """Command `number` was not done: its new buffers are spoilt, and what it wrote if it `began`, else withheld."""
        self._first = root if self._first is None else self._first
        self.is_on = True
        if not makes and not writes:
            self._due = root
        for buffer_id in writes:
            if began or buffer_id in self._born:
                self._spoil(buffer_id, root)
            else:
                self._withheld.setdefault(buffer_id, number)
        for buffer_id in makes:
            self._spoil(buffer_id, root)

    def made(self, ids: Iterable[int]) -> None:
        """These have been given a value that had none."""
        for buffer_id in ids:
            self._spoilt.pop(buffer_id, None)
            if self._first is not None:
                self._born.add(buffer_id)
        self._settle()

    def freed(self, ids: Iterable[int]) -> None:
        for buffer_id in ids:
            self._spoilt.pop(buffer_id, None)
            self._withheld.pop(buffer_id, None)
            self._born.discard(buffer_id)
        self._settle()

    def report(self) -> list[Any]:
        """Per withheld buffer the first command that would have written it, and the ids of all buffers here."""
        return [self._withheld, [*self._table, *self._spoilt]]

    def told(self, root: int, apart: Iterable[int]) -> None:
        """The person knows of that command: writes are done again. Buffers that lie `apart` are spoilt by it."""
        for buffer_id in set(apart) & self._table.keys():
            self._spoil(buffer_id, root)
        self._withheld.clear()
        self._born.clear()
        self._first = self._due = None
        self._settle()

    def _spoil(self, buffer_id: int, root: int) -> None:
        self._table.pop(buffer_id, None)
        self._withheld.pop(buffer_id, None)
        self._spoilt[buffer_id] = root

    def _settle(self) -> None:
        self.is_on = self._first is not None or bool(self._spoilt)
