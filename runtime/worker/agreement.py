"""Commands that several workers run together: if it fails on one of them, it fails on all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar, cast

from moaic.runtime.comm.shm_slots import GivenUp, Mailbox
from moaic.runtime.comm.transport import Transport
from moaic.runtime.worker.failed_commands import FATAL, Poisoned

Result = TypeVar("Result")


class Agreement:
    """One worker's side of the commands that it runs with others."""

    def __init__(self, mailbox: Mailbox, transport: Transport, blame: Callable[[Exception], int]) -> None:
        """`blame` returns the number of the command that caused an error."""
        self._mailbox: Final = mailbox
        self._transport: Final = transport
        self._blame: Final = blame
        self.number = -1
        """Number of the current command."""
        self.root: int | None = None
        """Number of the failed command that should have made an operand of the current one."""
        self.is_exposed = False
        """Whether peers may wait for this worker in a transport that cannot cancel their wait."""

    def run(self, ranks: Sequence[int], act: Callable[[], Result], *, carries: bool = True) -> Result:
        """Run `act` on all `ranks` together. Raises Poisoned on all of them if an operand is poisoned on one.

        If `act` fails on one of them, Poisoned is also raised on all, provided that the transport can cancel the waits
        of the others. It always can for an `act` that transfers no data (`carries` is false).
        """
        peers = [rank for rank in ranks if rank != self._mailbox.rank]
        if not peers:
            if self.root is not None:
                raise Poisoned(self.root)
            return act()
        self._mailbox.meet(peers, self.number + 1)
        if self._transport.can_be_given_up or not carries:
            return self._run_cancelable(act)
        self._part(self.root)
        self.is_exposed = True
        result = act()
        self.is_exposed = False
        return result

    def _run_cancelable(self, act: Callable[[], Result]) -> Result:
        result, root = None, self.root
        try:
            result = act() if root is None else None
        except GivenUp:
            pass
        except FATAL:
            raise
        except Exception as error:
            root = self._blame(error)
        self._part(root)
        return cast("Result", result)

    def _part(self, root: int | None) -> None:
        failed = self._mailbox.part(root)
        if failed is not None:
            raise Poisoned(failed)
