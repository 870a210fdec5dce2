"""Structural hash of a function: equal for functions that differ only in names, roles and locations."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from moaic.ir.graph import NOWHERE, Function, Op
from moaic.ir.layout import Mesh
from moaic.ir.printer import render_op, render_type


def key_of(function: Function) -> str:
    """24 hex digits for a function of local types, as `localize` returns it."""
    names = {value: str(number) for number, value in enumerate(function.values())}
    lines = [
        *(render_type(param.type, Mesh()) for param in function.params),
        *(render_op(_bare(op), names, Mesh()) for op in function.ops),
        " ".join(names[value] for value in function.results),
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:24]


def _bare(op: Op) -> Op:
    """The op without its location, its attributes sorted."""
    return replace(op, loc=NOWHERE, attrs=dict(sorted(op.attrs.items())))
