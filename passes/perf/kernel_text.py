"""Heavy ops as text, by which their measurements are kept: a function of that op alone, which workers can run."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from moaic.ir.graph import NOWHERE, Function, Op, Value
from moaic.ir.layout import Mesh
from moaic.ir.printer import render_function

NAME: Final = "kernel"


def kernel_text(op: Op) -> str:
    """The text of a function of one op of local types; equal for ops that differ in names, roles and locations."""
    params = {value: Value(value.type) for value in op.inputs()}
    results = tuple(Value(result.type) for result in op.results)
    bare = replace(op.with_operands(params), results=results, loc=NOWHERE, attrs=dict(sorted(op.attrs.items())))
    return render_function(Function(NAME, tuple(params.values()), (bare,), results), Mesh())
