"""Propagate symbolic zeros: a tangent that was not set is dropped instead of multiplied through the backward.

Legal because an op that is linear in a set of operands gives zero if all of the set are zero, and adding zero gives the
other operand.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import ClassVar

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module, Op, Value
from moaic.ir.ops import rule_of


@dataclass(frozen=True, slots=True)
class SymbolicZeros:
    name: ClassVar[str] = "zero"
    summary: ClassVar[str] = "drop tangents that are zero: all but those of scalars, or only those named"
    labels: str = ""
    """Labels of tangents, joined by `+`; if empty, all tangents but those of scalars."""

    def apply(self, module: Module) -> Module:
        main, named = module.main, set(self.labels.split("+"))
        tangents = [i for i in range(len(main.params)) if main.param_role(i).kind == "tangent"]
        if self.labels:
            labels = [main.param_role(i).label for i in tangents]
            if unknown := sorted(named - {*labels}):
                known = ", ".join(labels) or "none"
                raise Diagnostic(f"{main.name} has no tangent `{unknown[0]}`", hint=f"its tangents: {known}")
            return drop_zeros(module, [i for i in tangents if main.param_role(i).label in named])
        return drop_zeros(module, [i for i in tangents if main.params[i].type.shape != ()])


def drop_zeros(module: Module, zero_params: Collection[int]) -> Module:
    """`module`, given that the main parameters at these positions are zero; no op reads them any more."""
    main = module.main
    zeros = {main.params[i] for i in zero_params}
    mapping: dict[Value, Value] = {}
    ops: list[Op] = []
    for original in main.ops:
        op = original.with_operands(mapping)
        known = [i for i, value in enumerate(op.inputs()) if value in zeros]
        if known and op.name in ("aten.add.Tensor", "aten.sub.Tensor") and (kept := _other(op, zeros)) is not None:
            mapping[op.results[0]] = kept
        elif known and any(linear <= set(known) for linear in rule_of(op).linear):
            zeros.update(op.results)
        else:
            ops.append(op)
    results = tuple(mapping.get(value, value) for value in main.results)
    read = {*results, *(value for op in ops for value in op.inputs())}
    filled = [_zero(value) for value in main.values() if value in zeros and value in read and value not in main.params]
    return Module((*module.functions[:-1], replace(main, ops=(*filled, *ops), results=results)), module.mesh)


def _other(op: Op, zeros: set[Value]) -> Value | None:
    """The operand that a sum with zero equals: of the result's own type, and not subtracted."""
    values = list(op.inputs())
    if len(values) != 2 or "alpha" in op.attrs:
        return None
    kept = values[0] if values[1] in zeros else values[1]
    subtracted = op.name == "aten.sub.Tensor" and kept is values[1]
    return kept if kept.type == op.results[0].type and not subtracted else None


def _zero(value: Value) -> Op:
    fill: float | int = 0.0 if value.type.dtype.startswith(("f", "b")) else 0
    attrs = {"size": value.type.shape, "fill_value": fill, "dtype": value.type.dtype}
    return Op("aten.full", (), (value,), attrs)
