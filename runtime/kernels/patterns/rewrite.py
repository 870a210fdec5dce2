"""Replacement of ops in a function by kernels of moaic that were measured to win.

Ops without a reader after a replacement are dropped. A rewrite is legal if its ops have a topological order, and if no
op reads the values that the kernel exists to avoid.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from moaic.ir.backward_slice import backward_slice
from moaic.ir.graph import Function
from moaic.ir.topological_sort import sort_ops
from moaic.runtime.kernels.gains import Wins
from moaic.runtime.kernels.patterns import gated_rule, layer_norm_rule, norm_rule, rotary_rule
from moaic.runtime.kernels.patterns.match import DefUse
from moaic.runtime.kernels.patterns.rule import KernelRule, Replacement

RULES: Final[Mapping[str, Sequence[KernelRule]]] = {
    "norm": (norm_rule.forward, norm_rule.backward, layer_norm_rule.forward, layer_norm_rule.backward),
    "rotary": (rotary_rule.forward, rotary_rule.backward),
    "gated": (gated_rule.backward, gated_rule.forward),
}
"""The rules by kernel, in order of application: `gated` backward comes first, as parts of it match its forward, too."""


def with_kernels(function: Function, wins: Wins, names: Collection[str] = tuple(RULES)) -> Function:
    """`function`, of local types, with those of the named kernels that win at their shape."""
    for rule in [rule for name, rules in RULES.items() if name in names for rule in rules]:
        uses = DefUse(function)
        for anchor in [result for op in function.ops for result in op.results[:1]]:
            op = uses.makers.get(anchor)
            found = None if op is None else rule(uses, op)
            if found is not None and wins(found.kernel, found.shape, found.element):
                uses = DefUse(_applied(uses.function, found) or uses.function)
        function = uses.function
    return function


def _applied(function: Function, rewrite: Replacement) -> Function | None:
    """The function after a rewrite; None if that is not legal."""
    ops = sort_ops(dict(enumerate([*rewrite.ops, *(op.with_operands(rewrite.instead) for op in function.ops)])))
    if ops is None:
        return None
    results = tuple(rewrite.instead.get(result, result) for result in function.results)
    whole = replace(function, ops=ops, results=results)
    live = backward_slice(whole, results)
    rest = replace(whole, ops=tuple(op for at, op in enumerate(ops) if at in live))
    return None if {*rest.values()} & {*rewrite.gone} else rest
