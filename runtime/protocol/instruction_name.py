"""Names of a program's instructions in messages."""

from __future__ import annotations

from moaic.ir.graph import Function


def describe(main: Function, index: int) -> str:
    """The name of an instruction: its op, its callee and its source line."""
    if not 0 <= index < len(main.ops):
        return "the beginning"
    op = main.ops[index]
    name = f"segment @{op.callee}" if op.name == "call" else op.name
    place = f", from {op.loc.file}:{op.loc.line}" if op.loc.file else ""
    return f"{name} (instruction {index + 1} of {len(main.ops)}{place})"
