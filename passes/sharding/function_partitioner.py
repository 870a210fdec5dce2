"""Adds a mesh axis to one function: every value of the old function is materialized in one or more states.

The examples in the comments put `mb=2` or `dp=2` into a batch of eight rows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from moaic.ir.backward_slice import backward_slice
from moaic.ir.collectives import COLLECTIVE_FOR
from moaic.ir.graph import Function, Module, Op, Role, Value
from moaic.ir.layout import DEFERRED, PARTIAL, REPLICATED, Mesh, Replicated, Sharded, State
from moaic.ir.ops import Kind, check_known, kind_of, rule_of
from moaic.ir.ring_attention import rings_for
from moaic.ir.rules import Rule, Strategy, fits
from moaic.ir.types import TensorType
from moaic.passes.perf.flops import flops_in
from moaic.passes.sharding.axis import Axis, ParamStates, ResultStates, StrategySelector, UnshardableOp, unshardable


@dataclass(frozen=True, slots=True)
class Insertion:
    """An axis, the module that it is added to, and the decisions that this takes."""

    module: Module
    axis: Axis
    mesh: Mesh
    """The module's mesh with the axis."""
    select: StrategySelector
    suggested: Mapping[Value, State]
    """States in which results of ops should be made."""
    callee_params: ParamStates | None
    max_early_flops: float


class Callees(Protocol):
    """The functions that the rewritten function calls."""

    def specialized(self, name: str, states: tuple[State, ...]) -> Function: ...

    def sharded_by_caller(self, name: str, states: tuple[State, ...]) -> tuple[State, ...]: ...


class FunctionPartitioner:
    """Rewrites one function for operands in `states`.

    The ops in `computed_once` run on the unsharded value only, and shards of their results are cut from it. Those
    mapped to a reader run before the first micro-batch, since that op needs the result there.
    """

    def __init__(
        self,
        insertion: Insertion,
        callees: Callees,
        function: Function,
        states: tuple[State, ...],
        computed_once: Mapping[Op, Op | None],
    ) -> None:
        self.insertion = insertion
        self.callees = callees
        self.old = function
        self.axis = insertion.axis
        self.computed_once = computed_once
        self.ops: list[Op] = []
        self.materialized: dict[Value, dict[State, Value]] = {}
        """By old value, the new value in each state that exists so far."""
        self.first_state: dict[Value, State] = {}
        """By old value, the state in which the new function makes it first."""
        self.producer = {result: i for i, op in enumerate(function.ops) for result in op.results}
        self.params = tuple(self._define(p, s) for p, s in zip(function.params, states, strict=True))
        self.anew: dict[Value, State] = {}
        """By old value, the state in which a callee returns it: of the shards on which it was made anew.

            %m = aten.gt.Scalar %r {other = 0.1} : bool[8, 4]          # the mask of a dropout, of no operand's shards
            %p = aten.gt.Scalar %q {other = 0.1} : bool[8{dp}, 4]      # made anew, as the forward reads it
            return %y, %p                                              # the backward reads it so, too
        """
        self.current: Op | None = None
        """The old op that is being rewritten: it needs whatever is materialized meanwhile."""
        self.copies = defaultdict[Op, list[Op]](list)
        """By old op, the new ops that compute it, on the unsharded value or on shards."""
        self.last_views = frozenset[Op]()
        """Views that lead to results of the main function alone."""
        self.early_reader: dict[Op, Op] = {}
        """By op that runs before the first micro-batch, the op that needs its result there."""
        self.early_flops = Counter[Op]()
        """FLOPs before the first micro-batch, by the op that needs their result."""

    def run(self, results: ResultStates | None) -> Function:
        """The new function; `results` gives the states of main results, None leaves those of a callee as made."""
        if self.axis.is_loop and results is not None:
            self._shard_params()
            self.last_views = _last_views(self.old)
        roles = {value: self.old.result_role(i) for i, value in enumerate(self.old.results)}
        for index, op in enumerate(self.old.ops):
            self.current = op
            if op.name == "call":
                self._call(op)
            else:
                self._op(index, op)
            for value in op.results:
                if value in roles:
                    self._result(value, roles[value], results)
        returned = [self._result(value, self.old.result_role(i), results) for i, value in enumerate(self.old.results)]
        return replace(self.old, params=self.params, ops=tuple(self.ops), results=tuple(returned))

    def duplicates(self, result: Function) -> list[Op]:
        """Old ops that `result` computes more than once: on the unsharded value and on shards, or on several kinds."""
        live = {result.ops[index] for index in backward_slice(result, result.results)}
        return [op for op, copies in self.copies.items() if len(live.intersection(copies)) > 1]

    def _append(self, old: Op, new: Op) -> None:
        self.ops.append(new)
        self.copies[old].append(new)

    def _shard_params(self) -> None:
        """Main parameters stay unsharded over a loop axis; each is cut into its parts first.

            func @step(%x: f32[8{mb}, 64])             # as the states of the parts ask for
        becomes
            func @step(%x: f32[8, 64])
              %s = moai.shard %x {axis = "mb"} : f32[8{mb}, 64]
        """
        for value in self.old.params:
            part = self.first_state[value]
            if part != REPLICATED:
                whole = Value(value.type, self.materialized[value][part].name)
                self.materialized[value] = {REPLICATED: whole}
                self.reshard(value, part)
        self.params = tuple(self.materialized[value][REPLICATED] for value in self.old.params)

    def _result(self, value: Value, role: Role, results: ResultStates | None) -> Value:
        have = self.first_state[value]
        if results is None:
            return self.materialized[value][self.anew.get(value, have)]
        want = results(role, value, have)
        if self.axis.is_loop:
            want = REPLICATED if REPLICATED in self.materialized[value] else DEFERRED
        return self.reshard(value, want)

    def _define(self, old: Value, state: State) -> Value:
        new = Value(self._typed(old, state), old.name)
        self.materialized[old] = {state: new}
        self.first_state[old] = state
        return new

    def _typed(self, old: Value, state: State) -> TensorType:
        """The type of `old` in a state; a deferred value is replicated once it exists."""
        layout_state = REPLICATED if state == DEFERRED else state
        return old.type.with_layout(old.type.layout.with_state(self.axis.name, layout_state))

    def _op(self, index: int, op: Op) -> None:
        check_known(op)
        rule = rule_of(op)
        inputs = list(op.inputs())
        states = [(self.first_state[value], *self.materialized[value]) for value in inputs]
        selected = self.insertion.select(self.old, index, states, self.candidates(op, rule, inputs))
        if (reader := self.computed_once.get(op)) is not None:
            self._shard_early_results(op, selected.results, reader)
        else:
            self._emit(op, inputs, selected)

    def candidates(self, op: Op, rule: Rule, inputs: Sequence[Value]) -> list[Strategy]:
        """Every strategy that the operands' states suggest, or that is suggested; the replicated one last."""
        suggested = self.insertion.suggested
        known = [(dims, state) for v, dims in zip(op.results, rule.results, strict=True) if (state := suggested.get(v))]
        known += [(rule.operands[i], state) for i, value in enumerate(inputs) for state in self.materialized[value]]
        strategies: dict[Strategy, None] = {}
        for dims, state in known:
            strategy = rule.following(dims, state, self.axis.size)
            if strategy is not None and self._fits(op, inputs, strategy):
                strategies[strategy] = None
        for linear in rule.linear:
            if any(PARTIAL in self.materialized[inputs[i]] for i in linear):
                strategies[rule.by_linearity(linear)] = None
        strategies[rule.replicated()] = None
        return list(strategies)

    def _fits(self, op: Op, inputs: Sequence[Value], strategy: Strategy) -> bool:
        pairs = [*zip(inputs, strategy.operands, strict=True), *zip(op.results, strategy.results, strict=True)]
        return all(fits(value.type, self.axis.name, state, self.insertion.mesh) for value, state in pairs)

    def _emit(self, op: Op, inputs: Sequence[Value], strategy: Strategy) -> None:
        wanted = strategy.operands
        results = strategy.results
        is_unsharded = self.axis.is_loop and all(state == REPLICATED for state in wanted)
        if is_unsharded and any(REPLICATED not in self.materialized[value] for value in inputs):
            # An op over a loop axis that takes no part, and whose operands do not all exist unsharded yet.
            if op not in self.last_views and any(isinstance(self.first_state[value], Sharded) for value in inputs):
                # It needs all parts of an operand: run it before the loop.
                #   %h = aten.mm %x, %w : f32[8{mb}, 64]        %x and %w exist unsharded
                #   %s = aten.cumsum %h {dim = 0} : f32[8, 64]  the op; its rule lets no axis shard dim 0
                # becomes, before the first micro-batch,
                #   %h = aten.mm %x, %w : f32[8, 64]
                #   %s = aten.cumsum %h {dim = 0} : f32[8, 64]
                self._shard_early_results(op, results, op)
                return
            # It reads a sum over the parts, or what it makes is only returned: run it after the loop.
            #   %total = aten.sum %h : f32[] +mb
            #   %loss = aten.neg %total : f32[]
            # becomes, after the last micro-batch,
            #   %sum = moai.all_reduce %total {axis = "mb"} : f32[]
            #   %loss = aten.neg %sum : f32[]
            wanted = tuple(DEFERRED for _ in wanted)
            results = tuple(DEFERRED for _ in results)
        operands = self._operands(inputs, wanted)
        new = [self._define(old, state) for old, state in zip(op.results, results, strict=True)]
        ring = rings_for(op, self.axis.size, self.axis.name).get(strategy, op)
        self._append(op, _rebuild(ring, operands, tuple(new)))

    def _shard_early_results(self, op: Op, results: Sequence[State], reader: Op) -> None:
        """Run `op` before the loop, for `reader`, and cut from its results the shards that its strategy makes."""
        self._emit_early(op.results, reader)
        for result, state in zip(op.results, results, strict=True):
            self.first_state[result] = state if isinstance(state, Sharded) else REPLICATED
            self.reshard(result, self.first_state[result])

    def _operands(self, inputs: Sequence[Value], wanted: Sequence[State]) -> list[Value]:
        return [self.reshard(value, state) for value, state in zip(inputs, wanted, strict=True)]

    def _call(self, op: Op) -> None:
        inputs = list(op.inputs())
        wanted = self._call_states(op, inputs)
        if self.insertion.callee_params is None:
            wanted = self.callees.sharded_by_caller(op.callee, wanted)
        operands = self._operands(inputs, wanted)
        callee = self.callees.specialized(op.callee, wanted)
        states = [value.type.layout.state(self.axis.name) for value in callee.results]
        if (reader := self.computed_once.get(op)) is not None:
            self._shard_early_results(op, states, reader)
            return
        # A callee knows no deferred values: its parameter is replicated. Where one operand is deferred, so is the call.
        is_deferred = any(state == DEFERRED for state in wanted)
        new = [
            self._define(old, DEFERRED if is_deferred and state == REPLICATED else state)
            for old, state in zip(op.results, states, strict=True)
        ]
        self._append(
            op, replace(op, operands=tuple(operands), results=tuple(new), attrs={**op.attrs, "callee": callee.name})
        )

    def _call_states(self, op: Op, inputs: Sequence[Value]) -> tuple[State, ...]:
        if self.insertion.callee_params is not None:
            return self.insertion.callee_params(self.insertion.module.function(op.callee))
        states = [self.first_state[value] for value in inputs]
        if not self.axis.is_loop or any(isinstance(state, Sharded) for state in states):
            return tuple(state if isinstance(state, Sharded) else REPLICATED for state in states)
        return tuple(REPLICATED if REPLICATED in self.materialized[value] else DEFERRED for value in inputs)

    def reshard(self, value: Value, want: State) -> Value:
        """The new value for `value` in the state `want`, materialized here if it does not exist yet."""
        states = self.materialized[value]
        if want not in states:
            states[want] = self._materialize(value, want)
        return states[want]

    def _materialize(self, value: Value, want: State) -> Value:
        states = self.materialized[value]
        have = REPLICATED if REPLICATED in states else self.first_state[value]
        if self.axis.is_loop:
            if want == DEFERRED and REPLICATED in states:
                return states[REPLICATED]
            if want != DEFERRED and have != REPLICATED:
                # Other parts or the unsharded value are wanted within the loop, and no collective runs between
                # micro-batches. The loss's count of rows in the backward of the first one:
                #   %count = aten.sum %n : i64[] +mb
                #   %share = aten.div.Tensor %dy, %count : f32[8{mb}]
                # becomes, if the backward slice of %count is cheap (%early runs before the first micro-batch),
                #   %early = aten.sum %whole_n : i64[]
                #   %share = aten.div.Tensor %dy, %early : f32[8{mb}]
                # and else (all backwards run after all forwards)
                #   %late = moai.all_reduce %count {axis = "mb"} : i64[]
                #   %share = aten.div.Tensor %dy, %late : f32[8{mb}]
                if self._defers_backward(value):
                    states[REPLICATED] = self.reshard(value, DEFERRED)
                else:
                    self._emit_early((value,), self.current)
                return states[want] if want in states else self._materialize(value, want)
        elif PARTIAL in states and isinstance(want, Sharded) and REPLICATED not in states:
            # A reduce-scatter of the sum sends less than an all-gather and a cut would.
            have = PARTIAL
        if (
            have == REPLICATED
            and isinstance(want, Sharded)
            and (sharded := self._sharded_anew(value, want)) is not None
        ):
            return sharded
        return self._collective(value, have, want)

    def _defers_backward(self, value: Value) -> bool:
        """Whether the current op is one of a backward that should wait for all forwards instead of an early `value`."""
        if self.current is None or self.current.loc.side != "backward" or isinstance(self.first_state[value], Sharded):
            return False
        early_ops = (self.old.ops[i] for i in self._backward_slice((value,)))
        return sum(flops_in(self.insertion.module, op) for op in early_ops) > self.insertion.max_early_flops

    def _collective(self, value: Value, have: State, want: State) -> Value:
        if isinstance(have, Sharded) and want == PARTIAL:
            # No collective makes a sharded value partial: gather it, then `moai.first` keeps it on one rank.
            self.reshard(value, REPLICATED)
            have = REPLICATED
        source = self.materialized[value][have]
        new = Value(self._typed(value, want), value.name)
        name = COLLECTIVE_FOR[_layout_state(have), _layout_state(want)]
        loc = self.current.loc if self.current is not None else self.old.ops[0].loc
        self.ops.append(Op(name, (source,), (new,), {"axis": self.axis.name}, loc))
        return new

    def _sharded_anew(self, value: Value, want: State) -> Value | None:
        """The op of a replicated `value` run again on shards, so that the cut moves up to where a value enters.

            %t = aten.permute %x {dims = [1, 0]} : f32[4, 8]
            %s = moai.shard %t {axis = "dp"} : f32[4, 8{dp}]
        becomes
            %r = moai.shard %x {axis = "dp"} : f32[8{dp}, 4]
            %s = aten.permute %r {dims = [1, 0]} : f32[4, 8{dp}]

        None for a heavy op, one that is computed once, and one whose operands cannot be had in the states it takes.
        """
        index = self.producer.get(value)
        if index is None:
            return None
        op = self.old.ops[index]
        if kind_of(op) in (Kind.HEAVY, Kind.INSTRUCTION) or op in self.computed_once:
            return None
        rule = rule_of(op)
        inputs = list(op.inputs())
        strategy = rule.following(rule.results[op.results.index(value)], want, self.axis.size)
        if strategy is None or not self._fits(op, inputs, strategy) or PARTIAL in strategy.results:
            return None
        if any(
            REPLICATED not in self.materialized[v] and s not in self.materialized[v]
            for v, s in zip(inputs, strategy.operands, strict=True)
        ):
            return None
        operands = self._operands(inputs, strategy.operands)
        results = [Value(self._typed(o, s), o.name) for o, s in zip(op.results, strategy.results, strict=True)]
        for old, state, new in zip(op.results, strategy.results, results, strict=True):
            self.materialized[old].setdefault(state, new)
            self.anew.setdefault(old, state)
        self._append(op, _rebuild(op, operands, tuple(results)))
        return self.materialized[value][want]

    def _emit_early(self, targets: Sequence[Value], reader: Op | None) -> None:
        """Materialize `targets` unsharded before the first micro-batch, and count the FLOPs against `reader`.

        Every op of the backward slice is run again on values that exist unsharded; the lowering puts such ops before
        the loop, since none of their types has the axis.
        """
        for index in self._backward_slice(targets):
            op = self.old.ops[index]
            operands = [self.materialized[value][REPLICATED] for value in op.inputs()]
            results = tuple(Value(self._typed(old, REPLICATED), old.name) for old in op.results)
            copy = _rebuild(op, operands, results)
            if op.name == "call":
                copy = replace(copy, attrs={**op.attrs, "callee": self._unsharded_callee(op)})
            self._append(op, copy)
            if reader is not None:
                self.early_reader[op] = reader
                self.early_flops[reader] += flops_in(self.insertion.module, op)
            for old, new in zip(op.results, results, strict=True):
                self.materialized.setdefault(old, {}).setdefault(REPLICATED, new)
                self.first_state.setdefault(old, REPLICATED)

    def _unsharded_callee(self, op: Op) -> str:
        states: tuple[State, ...] = tuple(REPLICATED for _ in op.inputs())
        return self.callees.specialized(op.callee, states).name

    def _backward_slice(self, targets: Sequence[Value]) -> list[int]:
        """Positions of the old ops that must run unsharded for `targets`, in order.

        Raises UnshardableOp where the slice reaches a parameter that enters the function sharded.
        """
        waiting = [value for value in targets if REPLICATED not in self.materialized.get(value, {})]
        indices: set[int] = set()
        while waiting:
            value = waiting.pop()
            index = self.producer.get(value)
            if index is None:
                raise self._enters_sharded(value)
            if index not in indices:
                indices.add(index)
                waiting += [v for v in self.old.ops[index].inputs() if REPLICATED not in self.materialized.get(v, {})]
        return sorted(indices)

    def _enters_sharded(self, value: Value) -> UnshardableOp:
        assert self.current is not None
        what = f"`%{value.name}`" if value.name else f"a value of {list(value.type.shape)}"
        return unshardable(self.axis, self.current, f"{what} is split where it enters @{self.old.name}")


def _last_views(function: Function) -> frozenset[Op]:
    """The views whose results no op reads but other such views."""
    found, read = set[Op](), set[Value]()
    for op in reversed(function.ops):
        if kind_of(op) is Kind.VIEW and read.isdisjoint(op.results):
            found.add(op)
        else:
            read.update(op.inputs())
    return frozenset(found)


def _layout_state(state: State) -> type[State]:
    """The class of the state as types write it: a deferred value is replicated."""
    return Replicated if state == DEFERRED else type(state)


def _rebuild(op: Op, operands: Sequence[Value], results: tuple[Value, ...]) -> Op:
    """`op` over new values; `operands` are flattened, absent ones left out."""
    rest = iter(operands)
    structured = tuple(
        tuple(None if value is None else next(rest) for value in operand)
        if isinstance(operand, tuple)
        else None
        if operand is None
        else next(rest)
        for operand in op.operands
    )
    return replace(op, operands=structured, results=results)
