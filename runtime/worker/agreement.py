"""Commands that several workers run together: where one of them cannot go on, none of them counts it as done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar, cast

from moaic.runtime.comm.shm_slots import GivenUp, Mailbox
from moaic.runtime.comm.transport import Transport
from moaic.runtime.worker.trouble import LASTING, Spoilt

Result = TypeVar("Result")


class Agreement:
    """One worker's side of the commands that it runs with others."""

    def __init__(self, mailbox: Mailbox, transport: Transport, blame: Callable[[Exception], int]) -> None:
        """`blame` gives the number of the command to blame for an error."""
        self._mailbox: Final = mailbox
        self._transport: Final = transport
        self._blame: Final = blame
        self.number = -1
        """Number of the command that is being run."""
        self.root: int | None = None
        """Number of the failed command for which this worker lacks an operand."""
        self.is_exposed = False
        """Whether peers wait for this worker in a transport from which they cannot be called back."""

    def run(self, ranks: Sequence[int], act: Callable[[], Result], *, carries: bool = True) -> Result:
        """What `act` returns, which `ranks` do together. Raises Spoilt on all of them where one lacks an operand.

        It is also raised on all of them where one fails on the way, if the transport can call the others back from
        where they wait; it always can for an act that carries no data.
        """
        peers = [rank for rank in ranks if rank != self._mailbox.rank]
        if not peers:
            if self.root is not None:
                raise Spoilt(self.root)
            return act()
        self._mailbox.meet(peers, self.number + 1)
        if self._transport.can_be_given_up or not carries:
            return self._tried(act)
        self._part(self.root)
        self.is_exposed = True
        result = act()
        self.is_exposed = False
        return result

    def _tried(self, act: Callable[[], Result]) -> Result:
        result, root = None, self.root
        try:
            result = act() if root is None else None
        except GivenUp:
            pass
        except LASTING:
            raise
        except Exception as error:
            root = self._blame(error)
        self._part(root)
        return cast("Result", result)

    def _part(self, root: int | None) -> None:
        found = self._mailbox.part(root)
        if found is not None:
            raise Spoilt(found)
