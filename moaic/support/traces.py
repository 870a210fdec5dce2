"""moaic's frames left out of the traceback of an error, in which users look for their own lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final

_PACKAGE: Final = Path(__file__).absolute().parents[1]


def is_ours(file: str) -> bool:
    """Whether a file of code is moaic's."""
    return Path(file).is_relative_to(_PACKAGE)


def are_full() -> bool:
    """Whether the user asks for all frames."""
    # The device is registered with every `import torch`, and then loads nothing of the runtime.
    from moaic.runtime.host.env_flags import FULL, TRACEBACK_VARIABLE

    return os.environ.get(TRACEBACK_VARIABLE) == FULL


def shorten(error: BaseException) -> None:
    """Leave out moaic's frames of an error and its causes, but the last of each, unless the user asks for all.

    Called where an error leaves moaic: whatever prints it then, such as `logging.exception`, prints it short.
    """
    seen: set[int] = set()
    # While Python ends, nothing can be imported any more.
    each: BaseException | None = None if sys.is_finalizing() or are_full() else error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        each.__traceback__ = _shortened(each.__traceback__)
        each = each.__cause__ or each.__context__


def _shortened(trace: TracebackType | None) -> TracebackType | None:
    links = list(_links(trace))
    ours = [link for link in links if is_ours(link.tb_frame.f_code.co_filename)]
    kept = [link for link in links if link not in ours[:-1]]
    for link, following in zip(kept, [*kept[1:], None], strict=True):
        link.tb_next = following
    return kept[0] if kept else None


def _links(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next
