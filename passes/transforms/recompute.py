"""Activation recomputation: select the values that each forward/backward pair of functions saves.

`full` saves only the inputs of the forward. `saved` saves the fewest bytes from which the backward can be computed
without running a heavy op again: a minimum cut, as PyTorch's partitioner takes per graph, here once per pair. Inputs
of the layer are never recomputed. Legal because every op is a pure function of its operands.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

from moaic.ir.graph import Function, Module, Op, Value
from moaic.ir.ops import Kind, kind_of
from moaic.passes.config import Recompute
from moaic.passes.transforms.outline import fresh


@dataclass(frozen=True, slots=True)
class Pair:
    """A forward function, its backward, and the two calls of each layer."""

    forward: Function
    backward: Function
    sites: tuple[tuple[Op, Op], ...]


@dataclass(frozen=True, slots=True)
class Recomputation:
    name: ClassVar[str] = "recompute"
    summary: ClassVar[str] = "select what each layer's forward saves for its backward"
    mode: Recompute = "saved"

    def apply(self, module: Module) -> Module:
        return recompute(module, self.mode)


def recompute(module: Module, mode: Recompute) -> Module:
    """`module` with every layer's saved values chosen by `mode`."""
    for forward, backward in _pair_names(module):
        pair = _pair(module, forward, backward)
        if pair is not None:
            module = _rewrite(module, pair, mode)
    return module


def _pair_names(module: Module) -> list[tuple[str, str]]:
    """Names of functions that are called for the same layers, in the forward and in the backward."""
    calls: dict[str, dict[str, str]] = defaultdict(dict)
    for op in module.main.ops:
        if op.name == "call":
            calls[op.loc.module][op.loc.side] = op.callee
    pairs = {(sides["forward"], sides["backward"]) for sides in calls.values() if {"forward", "backward"} <= {*sides}}
    forwards = [forward for forward, _ in pairs]
    return sorted(pair for pair in pairs if forwards.count(pair[0]) == 1)


def _pair(module: Module, forward: str, backward: str) -> Pair | None:
    """The pair and its call sites; None where a layer calls one of the two without the other."""
    sites: dict[str, dict[str, Op]] = defaultdict(dict)
    for op in module.main.ops:
        if op.name == "call" and op.callee in (forward, backward):
            sites[op.loc.module][op.callee] = op
    if any(len(site) != 2 for site in sites.values()):
        return None
    calls = tuple((site[forward], site[backward]) for site in sites.values())
    return Pair(module.function(forward), module.function(backward), calls)


def _same_at_all(pair: Pair, position: int, side: int) -> list[int]:
    """Positions among the forward call's operands (side 0) or results (side 1) that feed one backward parameter."""
    common: set[int] | None = None
    for forward, backward in pair.sites:
        value = backward.operands[position]
        sources = forward.operands if side == 0 else forward.results
        here = {i for i, source in enumerate(sources) if source is value}
        common = here if common is None else common & here
    return sorted(common or ())


def _rewrite(module: Module, pair: Pair, mode: Recompute) -> Module:
    forward, backward = pair.forward, fresh(pair.backward)
    fed: dict[Value, Value] = {}
    for position, param in enumerate(backward.params):
        for i in _same_at_all(pair, position, 1)[:1]:
            fed[param] = forward.results[i]
        for i in _same_at_all(pair, position, 0)[:1]:
            fed[param] = forward.params[i]
    saved = _saved(module, pair, list(dict.fromkeys(fed.values())), mode)
    if saved is None:
        return module
    recomputed = _ops_between(forward, saved, list(fed.values()))
    if recomputed is None:
        return module
    return _replaced(module, pair, backward, fed, saved, recomputed)


def _saved(module: Module, pair: Pair, needed: Sequence[Value], mode: Recompute) -> set[Value] | None:
    if mode == "full":
        return set(pair.forward.params)
    return _minimum_cut(pair.forward, needed, _entering_bytes(module, pair))


def _entering_bytes(module: Module, pair: Pair) -> list[int]:
    """Bytes to save each forward parameter: none for a value that is live anyway (parameters, shared values)."""
    main = set(module.main.params)
    costs: list[int] = []
    for position, param in enumerate(pair.forward.params):
        sources = {forward.operands[position] for forward, _ in pair.sites}
        free = len(sources) == 1 or all(source in main for source in sources)
        costs.append(0 if free else param.type.nbytes())
    return costs


def _minimum_cut(function: Function, needed: Sequence[Value], entering: Sequence[int]) -> set[Value]:
    """The values to save: a minimum cut between values that cannot be recomputed and those that the backward reads."""
    # Not with this file: it takes 0.15 s, and a plan from the cache needs no cut.
    import networkx as nx

    graph: nx.DiGraph[tuple[Value, int] | str] = nx.DiGraph()
    for param, cost in zip(function.params, entering, strict=True):
        graph.add_edge("source", (param, 0))
        graph.add_edge((param, 0), (param, 1), capacity=cost)
    for op in function.ops:
        for result in op.results:
            graph.add_edge((result, 0), (result, 1), capacity=result.type.nbytes() + 1)
            if kind_of(op) is Kind.HEAVY:
                graph.add_edge("source", (result, 0))
            for value in op.inputs():
                graph.add_edge((value, 1), (result, 0))
    for value in needed:
        graph.add_edge((value, 1), "sink")
    if not needed:
        return set()
    minimum_cut = cast("Any", nx.minimum_cut)
    reached: set[tuple[Value, int] | str] = minimum_cut(graph, "source", "sink")[1][0]
    return {value for value in function.values() if (value, 0) in reached and (value, 1) not in reached}


def _ops_between(function: Function, saved: set[Value], needed: Sequence[Value]) -> list[Op] | None:
    """Ops that make `needed` from `saved`; None where a heavy op or an absent value would be needed."""
    producer = {result: op for op in function.ops for result in op.results}
    waiting, ops = [value for value in needed if value not in saved], set[Op]()
    while waiting:
        op = producer.get(waiting.pop())
        if op is None:
            continue
        if op not in ops:
            ops.add(op)
            waiting += [value for value in op.inputs() if value not in saved]
    return [op for op in function.ops if op in ops]


def _replaced(
    module: Module, pair: Pair, backward: Function, fed: dict[Value, Value], saved: set[Value], recomputed: list[Op]
) -> Module:
    forward = pair.forward
    read = {value for op in recomputed for value in op.inputs()} | {v for v in fed.values() if v in saved}
    made = {result for op in recomputed for result in op.results}
    kept = [value for value in forward.values() if value in read and value not in made]
    elsewhere = _read_elsewhere(module, pair)
    results = [value for i, value in enumerate(forward.results) if i in elsewhere]
    results += [value for value in kept if value not in forward.params and value not in results]
    new_forward = replace(forward, results=tuple(results))
    others = [param for param in backward.params if param not in fed]
    again = [replace(op, loc=replace(op.loc, side="backward")) for op in recomputed]
    joined = Function(
        backward.name,
        (*kept, *others),
        (*again, *(op.with_operands(fed) for op in backward.ops)),
        tuple(fed.get(value, value) for value in backward.results),
    )
    functions = {forward.name: fresh(new_forward), backward.name: fresh(joined)}
    calls = _new_calls(pair, new_forward, kept, [backward.params.index(param) for param in others])
    main = replace(module.main, ops=tuple(calls.get(op, op) for op in module.main.ops))
    return Module((*(functions.get(f.name, f) for f in module.functions[:-1]), main), module.mesh)


def _read_elsewhere(module: Module, pair: Pair) -> set[int]:
    """Positions of forward results that any op but the paired backward reads."""
    partner = dict(pair.sites)
    readers: dict[Value, set[Op | None]] = defaultdict(set)
    for op in module.main.ops:
        for value in op.inputs():
            readers[value].add(op)
    for value in module.main.results:
        readers[value].add(None)
    return {
        i
        for forward, backward in partner.items()
        for i, result in enumerate(forward.results)
        if readers[result] - {backward}
    }


def _new_calls(pair: Pair, forward: Function, kept: Sequence[Value], others: Sequence[int]) -> dict[Op, Op]:
    calls: dict[Op, Op] = {}
    for old_forward, old_backward in pair.sites:
        known = dict(zip(pair.forward.results, old_forward.results, strict=True))
        results = tuple(known.get(value) or Value(value.type, value.name) for value in forward.results)
        calls[old_forward] = replace(old_forward, results=results)
        named = dict(zip(forward.results, results, strict=True))
        entering = dict(zip(pair.forward.params, old_forward.operands, strict=True))
        operands = (*(entering.get(v, named.get(v)) for v in kept), *(old_backward.operands[i] for i in others))
        calls[old_backward] = replace(old_backward, operands=operands)
    return calls
