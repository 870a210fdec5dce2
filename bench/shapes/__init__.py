"""Shapes of training scripts: each is a generator that trains on a device and yields the loss of every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shapes import dense, models, pictures, text

Script = Callable[[str], Iterator[float]]

SCRIPTS: dict[str, Script] = {
    script.__name__.replace("_", " "): script
    for script in (*dense.SCRIPTS, *pictures.SCRIPTS, *text.SCRIPTS, *models.SCRIPTS)
}
"""By name, in the order of the table."""
