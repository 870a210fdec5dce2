"""What one frame may hold, and the error for one that holds more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


class Refused(Exception):
    """A frame breaks a limit or a rule; the text says which, as `a body of 9 bytes, the most is 8`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one frame may hold.

    A frame has the commands of one queue, at most 500. Programs are the largest: 0.1 MB of text for the largest of the
    tests, so the body's limit is far away. Lists in traces and checkpoints grow with a run: a trace is sent in pieces,
    a Store has about 8 values for each tensor and worker. Values take up to 80 bytes each once they are read.
    """

    body_bytes: int = 64 << 20
    blocks: int = 1 << 16
    depth: int = 32
    """Lists and maps within each other."""
    values: int = 1 << 21
    """Values of a body, the lists and maps among them; counted where their memory could be large (`body_checks`)."""
    block_bytes: int | None = None
    """Of one block. Unbounded for workers of this host, which are the user's own and take tensors of any size."""
    all_block_bytes: int | None = None
    """Of all blocks of a frame together."""


LIMITS: Final = Limits()
