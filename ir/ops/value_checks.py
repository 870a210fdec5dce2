"""Checks of values while a step runs: `moai.checked`."""

from __future__ import annotations

from moaic.ir.graph import Op
from moaic.ir.layout import Mesh
from moaic.ir.op_names import CHECKED
from moaic.ir.ops.checks import operand_count, result_count
from moaic.ir.ops.declaration import Complaints, OpDecl
from moaic.ir.ops.rule_building import factor_names, operand_types, rule_of_factors
from moaic.ir.printer import render_type
from moaic.ir.rules import Rule


def _checked(op: Op) -> Rule:
    """A condition over the first dims of the value is split with them; any other is whole on every rank."""
    value, condition = (tensor.shape for tensor in operand_types(op))
    names = factor_names(len(value))
    follows = value[: len(condition)] == condition
    asked = names[: len(condition)] if follows else [f"{name}!" for name in factor_names(len(condition), "s")]
    return rule_of_factors(op, [names, asked], [names], (0,))


def _check(op: Op, mesh: Mesh) -> Complaints:
    yield from operand_count(op, 2)
    yield from result_count(op, 1)
    value, condition = (operand.type for operand in op.inputs())
    result = op.results[0].type
    if (result.dtype, result.shape) != (value.dtype, value.shape):
        yield f"the result is `{render_type(result, mesh)}`, not `{render_type(value, mesh)}` as the operand"
    if condition.dtype not in ("bool", "i32"):
        yield f"what is asked is bools, or codes that are i32, not `{render_type(condition, mesh)}`"
    if not isinstance(op.attrs.get("message"), str):
        yield "attribute `message` is no text"


OPS = (OpDecl(CHECKED, _checked, check=_check, lowered=True, host_reads=True),)
