"""The shares of the work that the workers of a pipeline have, as users write them: `5+2` for two of unequal speed."""

from __future__ import annotations

import re
from typing import Final

from moaic.ir.errors import Diagnostic
from moaic.passes.schedules import Schedule
from moaic.text.units import count

EQUAL: Final = "equal"
"""The word for as large a share for each worker."""

MOST: Final = 9999
"""The largest share."""

_SHARES = re.compile(r"[1-9][0-9]{0,3}(\+[1-9][0-9]{0,3})*")


def parse_shares(text: str) -> tuple[int, ...]:
    """The shares in a text; raises Diagnostic where it is none."""
    if not _SHARES.fullmatch(text):
        raise Diagnostic(
            f"stage_shares={text} is not of the form 5+2",
            hint=f"the share of each worker along pp, from 1 to {MOST}, or {EQUAL}",
        )
    return tuple(map(int, text.split("+")))


def for_other_workers(text: str, workers: int) -> Diagnostic:
    """The error for shares that are not one for each of so many workers along pp."""
    given = count(len(parse_shares(text)), "worker")
    return Diagnostic(
        f"stage_shares={text} has the shares of {given} along pp, the plan has pp={workers}",
        hint="one number for each worker along pp, which are at least two: stage_shares=5+2",
    )


def shares_of_stages(text: str, schedule: Schedule) -> tuple[int, ...]:
    """By stage, its share: that of its worker, or an equal one. Raises Diagnostic where they are for other workers."""
    workers = len(schedule.workers)
    shares = (1,) * workers if text == EQUAL else parse_shares(text)
    if len(shares) != workers:
        raise for_other_workers(text, workers)
    return tuple(shares[worker] for worker in schedule.owners)
