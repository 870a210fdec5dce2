"""The exception for mistakes of the user; a bug of moaic raises any other exception."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextSpan:
    """A place in a text: `width` characters from line and column, both counted from 1, and the line itself."""

    file: str
    line: int
    column: int
    width: int
    source: str

    def render(self) -> str:
        """The source line with carets below; tabs are kept so that the carets stand where the text does."""
        margin = "".join("\t" if char == "\t" else " " for char in self.source[: self.column - 1])
        return f"  {self.source}\n  {margin}{'^' * max(1, self.width)}"


class Diagnostic(Exception):
    """A mistake of the user: what is wrong, where, and what to do about it.

    `context` is printed below the message: the neighboring ops, if there is no source text.
    """

    def __init__(self, message: str, span: TextSpan | None = None, context: str = "", hint: str = "") -> None:
        super().__init__(message, span, context, hint)
        self.message = message
        self.span = span
        self.context = context
        self.hint = hint

    def __str__(self) -> str:
        place = f"{self.span.file}:{self.span.line}:{self.span.column}: " if self.span else ""
        parts = [f"{place}error: {self.message}"]
        if self.span:
            parts.append(self.span.render())
        if self.context:
            parts.append(self.context)
        if self.hint:
            parts.append(f"hint: {self.hint}")
        return "\n".join(parts)
