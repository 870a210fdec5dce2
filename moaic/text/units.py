"""Sizes, large numbers and short times as text."""

from __future__ import annotations

from typing import Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
TIB: Final = 1 << 40


def mib(nbytes: float) -> str:
    """Bytes as whole mebibytes: `512 MiB`."""
    return f"{nbytes / MIB:.0f} MiB"


def gib(nbytes: float, digits: int = 1) -> str:
    """Bytes as gibibytes with `digits` decimals: `1.5 GiB`."""
    return f"{nbytes / GIB:.{digits}f} GiB"


def amount(number: float) -> str:
    """Three digits and a decimal prefix, ending in a space or the prefix: `1.23 G`."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(number) < 999.5:
            return f"{number:.3g} {prefix}"
        number /= 1000
    return f"{number:.3g} P"


def duration(seconds: float) -> str:
    """Seconds as milliseconds, or as microseconds below one millisecond: `1.23 ms`, `4.56 us`."""
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def count(number: int, noun: str) -> str:
    """A number with its noun, in the plural unless it is one: `1 op`, `1,024 ops`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
