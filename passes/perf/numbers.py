"""Numbers of a machine, each with its source."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum


class MeasureSource(IntEnum):
    """The source of a number, the best first. A result of several numbers has the worst of their sources."""

    MEASURED = 0
    INTERPOLATED = 1
    """Measured for another dtype, size or number of ranks."""
    PUBLISHED = 2
    """From the vendor's data sheet: a peak."""
    ASSUMED = 3

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Number:
    """A value and its source."""

    value: float
    source: MeasureSource = MeasureSource.ASSUMED

    def worse(self, source: MeasureSource) -> Number:
        """This number, its source no better than `source`."""
        return Number(self.value, max(self.source, source))

    def times(self, count: int) -> Number:
        return Number(count * self.value, self.source)

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.source})"


ZERO = Number(0.0, MeasureSource.MEASURED)


def total(numbers: Iterable[Number]) -> Number:
    """The sum, with the worst source among the numbers that are not zero."""
    value, source = 0.0, MeasureSource.MEASURED
    for number in numbers:
        value += number.value
        if number.value:
            source = max(source, number.source)
    return Number(value, source)
