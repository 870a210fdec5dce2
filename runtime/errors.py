"""What went wrong on the workers, as the person sees it."""

from __future__ import annotations


class WorkerError(RuntimeError):
    """A worker raised or ended. It names the worker, what it did, and the line of the person's program."""


class OutOfMemory(WorkerError):
    """A worker got no more memory. It says what was asked for, what was free, and what would do with less."""
