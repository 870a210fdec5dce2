"""Failed commands on a worker: poisoned buffers and withheld writes, so that an error costs only its own results.

The results of a failed command are *poisoned*: a read of one reports the number of that command, and a command that
reads one has poisoned results. From a failure until it is raised to the user, writes to older buffers are *withheld*,
and these buffers read as poisoned. Had the error been raised at its own line, no later line would have written them:

    y = table[i]    # i is out of range: y is poisoned; the user does not know yet
    p.add_(1)       # withheld: p keeps its value
    z = y + 1       # z is poisoned
    z.item()        # raises the IndexError of `table[i]`; from then on p can be read and written
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Final

import torch
from torch import Tensor

from moaic.runtime.comm.peer_links import Unreachable
from moaic.runtime.comm.shm_slots import PeerLost


class Poisoned(Exception):
    """A command reads a result of failed command `root`, on this worker or on one that runs it together with this."""

    def __init__(self, root: int) -> None:
        super().__init__(root)
        self.root = root


FATAL: Final = (
    PeerLost,
    Unreachable,
    *(kind for kind in [getattr(torch, "AcceleratorError", None)] if kind is not None),
)
"""Fatal errors, after which a worker cannot continue: a peer is gone or beyond reach, or the GPU has failed."""


class FailedCommands:
    """The poisoned and withheld buffers of one worker's table."""

    def __init__(self, table: dict[int, Tensor]) -> None:
        self._table = table
        self._poisoned: dict[int, int] = {}
        self._withheld: dict[int, int] = {}
        self._new: set[int] = set()
        self._first: int | None = None
        self._due: int | None = None
        self.is_on = False
        """Whether any buffer may be poisoned or withheld; the fast path checks only this."""

    @property
    def first(self) -> int | None:
        """The first command that failed since a failure was last raised to the user."""
        return self._first

    def is_poisoned(self, buffer_id: int) -> bool:
        return buffer_id in self._poisoned

    def root_of(self, reads: Iterable[int]) -> int | None:
        """The failed command because of which one of these buffers cannot be read; None if all can be."""
        for buffer_id in reads:
            if (root := self._poisoned.get(buffer_id)) is not None:
                return root
            if buffer_id in self._withheld:
                return self._first
        return None

    def check(self, reads: Iterable[int]) -> None:
        """Raise Poisoned if one of these cannot be read; any read also reports a failed command without results."""
        if (root := self.root_of(reads)) is not None or (root := self._due) is not None:
            raise Poisoned(root)

    def withholds(self, writes: Iterable[int]) -> bool:
        """Whether writes to these are withheld: one of the buffers is older than the first failure."""
        return self._first is not None and any(each in self._table and each not in self._new for each in writes)

    def record_failure(
        self, root: int, number: int, makes: Collection[int], writes: Collection[int], *, began: bool
    ) -> None:
        """Record the failure of command `number`, of which `root` is the cause.

        Its new buffers are poisoned. So are the buffers that it writes if it `began`; else these writes are withheld.
        """
        self._first = root if self._first is None else self._first
        self.is_on = True
        if not makes and not writes:
            self._due = root
        for buffer_id in writes:
            if began or buffer_id in self._new:
                self._poison(buffer_id, root)
            else:
                self._withheld.setdefault(buffer_id, number)
        for buffer_id in makes:
            self._poison(buffer_id, root)

    def made(self, ids: Iterable[int]) -> None:
        """Record that a command gave these buffers their first value."""
        for buffer_id in ids:
            self._poisoned.pop(buffer_id, None)
            if self._first is not None:
                self._new.add(buffer_id)
        self._update()

    def freed(self, ids: Iterable[int]) -> None:
        for buffer_id in ids:
            self._poisoned.pop(buffer_id, None)
            self._withheld.pop(buffer_id, None)
            self._new.discard(buffer_id)
        self._update()

    def report(self) -> list[Any]:
        """The first withheld command by buffer, the ids of this worker's buffers, and of its poisoned ones."""
        return [self._withheld, [*self._table], [*self._poisoned]]

    def resume_writes(self, root: int, lost: Iterable[int]) -> None:
        """Stop withholding writes after command `root` was raised; it poisons buffers that cannot be mended."""
        for buffer_id in set(lost) & self._table.keys():
            self._poison(buffer_id, root)
        self._withheld.clear()
        self._new.clear()
        self._first = self._due = None
        self._update()

    def _poison(self, buffer_id: int, root: int) -> None:
        self._table.pop(buffer_id, None)
        self._withheld.pop(buffer_id, None)
        self._poisoned[buffer_id] = root

    def _update(self) -> None:
        self.is_on = self._first is not None or bool(self._poisoned)
