"""Large numbers as people read them."""

from __future__ import annotations


def amount(number: float) -> str:
    """Three digits and a decimal prefix, ending in a space or the prefix: `1.23 G`."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(number) < 999.5:
            return f"{number:.3g} {prefix}"
        number /= 1000
    return f"{number:.3g} P"
