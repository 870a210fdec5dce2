"""What a full disk makes of a program, as one sentence."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Final

REASONS: Final = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS))


class CannotWrite(Exception):
    """Nothing can be written to a disk; the text says why, where, and what to do."""


@contextmanager
def disk_errors_named(where: Callable[[], str]) -> Generator[None]:
    """Raise CannotWrite for an error inside that a disk has caused, whoever has written to it."""
    try:
        yield
    except Exception as error:
        # Inductor wraps errors, a C++ compiler prints them, and torch.save raises another one after it.
        found = (reason for each in chain(error) for reason in REASONS if reason in str(each))
        reason = next(found, None)
        if reason is None:
            raise
        raise CannotWrite(f"{reason}, {where()}") from error


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what it was raised from or after, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
