"""Large numbers, and short times, as people read them."""

from __future__ import annotations


def amount(number: float) -> str:
    """Three digits and a decimal prefix, ending in a space or the prefix: `1.23 G`."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(number) < 999.5:
            return f"{number:.3g} {prefix}"
        number /= 1000
    return f"{number:.3g} P"


def duration(seconds: float) -> str:
    """`1.23 ms`, or `4.56 us` where it is less than a millisecond."""
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
