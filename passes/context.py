"""Put the axis `cp` into a module: the sequence is split, attention included.

What each rank needs of other positions is a conversion like any other, and the solver picks the cheapest: keys and
values gathered for its own rows of queries, or an exchange of rows for heads before and after attention. Both balance
the work of causal masks: every rank has as many rows with all their keys, or whole rows for its heads. Weights are not
split: that is what `tp` is for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module, Op, Value
from moaic.ir.layout import State
from moaic.ir.ops import Kind, kind_of
from moaic.passes.annotate import Annotated, Axis
from moaic.passes.softmax import take_apart
from moaic.passes.solver_prices import Prices
from moaic.passes.solver_problem import weight_values
from moaic.passes.solver_states import Possible, possible
from moaic.passes.tensor import ATTENTION, alternatives, solved


def follow_context(module: Module, axis: Axis, prices: Prices | None = None) -> Annotated:
    """`module` with its sequence split over `axis`; raises Diagnostic where there is none that divides."""
    _check(module, axis)
    module, found = take_apart(module, axis, _possible)
    return solved(module, axis, _used(module, axis, found), prices or Prices(), inputs_split=True)


def _possible(module: Module, axis: Axis) -> Possible:
    return possible(module, axis, _seeds, weight_values)


def lengths(module: Module) -> list[int]:
    """Lengths of sequences: rows and columns of attention, and tokens in a row of the batch."""
    found: dict[int, None] = {}
    for index, value in enumerate(module.main.params):
        if module.main.param_role(index).kind == "input" and value.type.dtype == "i64" and len(value.type.shape) == 2:
            found[value.type.shape[1]] = None
    for op in _attention(module):
        found.update(dict.fromkeys(value.type.shape[2] for value in _query_and_key(op)))
    return [length for length in found if length > 1]


def _attention(module: Module) -> Iterator[Op]:
    return (op for function in module.functions for op in function.ops if op.name in ATTENTION)


def _query_and_key(op: Op) -> tuple[Value, Value]:
    first = 0 if op.name == "moai.sdpa" else 1
    query, key, *_ = list(op.inputs())[first:]
    return query, key


def _check(module: Module, axis: Axis) -> None:
    asked = f"{axis.name}={axis.size}"
    found = lengths(module)
    if not found:
        raise Diagnostic(
            f"{asked} splits the sequence, and @{module.main.name} has none: no attention, no rows of tokens"
        )
    if all(length % axis.size for length in found):
        most = max(found)
        would = [f"{axis.name}={n}" for n in range(2, most + 1) if any(length % n == 0 for length in found)]
        raise Diagnostic(f"{asked} does not divide a sequence of {most}{alternatives(would)}")


def _seeds(module: Module, axis: Axis) -> Iterator[tuple[Value, State]]:
    """The sequence in the inputs and in attention, and the heads of attention."""
    n, wanted = axis.size, {length for length in lengths(module) if length % axis.size == 0}
    for index, value in enumerate(module.main.params):
        if module.main.param_role(index).kind in ("input", "tangent"):
            shape = value.type.shape
            yield from ((value, (dim, size // n)) for dim, size in enumerate(shape) if dim and size in wanted)
    for op in _attention(module):
        for value in _query_and_key(op):
            heads, rows = value.type.shape[1:3]
            yield from ((value, (dim, size // n)) for dim, size in ((1, heads), (2, rows)) if size and size % n == 0)


def _used(module: Module, axis: Axis, found: Possible) -> Possible:
    """`found` with every heavy op split that can be: an axis that was asked for is used, however small the model."""
    strategies = dict(found.strategies)
    heavy = [op for op in strategies if kind_of(op) is Kind.HEAVY]
    for op in heavy:
        strategies[op] = strategies[op][:-1] or strategies[op]
    if all(len(found.strategies[op]) == 1 for op in heavy):
        raise Diagnostic(
            f"{axis.name}={axis.size} can split none of the {len(heavy)} matrix products of @{module.main.name} "
            f"along the sequence"
        )
    return replace(found, strategies=strategies)
