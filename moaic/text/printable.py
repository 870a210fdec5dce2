"""Text from somebody else, as a terminal may show it."""

from __future__ import annotations


def printable(text: str, most: int) -> str:
    """The first `most` characters, without those that move the cursor, change colors or begin a line."""
    return "".join(each if each.isprintable() else "?" for each in text[:most])
