"""Put one mesh axis into a module: a strategy per op, the conversions between them, all of it written into the types.

The axis may lie in space (its ranks run side by side) or in time (`mb`: its ranks run one after the other). In time a
finished sum exists only after the last micro-batch: such a value is DEFERRED. What a micro-batch needs whole must be
made *before* the first one, from values that are whole from the start: its cone runs unsplit, and what that costs is
returned. Where that costs much and only a backward needs it, all backwards wait until all forwards are done.

No value is made twice if that could round otherwise: a value that equals the maximum must equal it in its part, too. Of
what exists whole the parts are cut; only ops that round nothing are done both for the whole and for the parts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from moaic.ir.backward_slice import backward_slice
from moaic.ir.collectives import COLLECTIVES
from moaic.ir.errors import Diagnostic
from moaic.ir.exact import rounds
from moaic.ir.graph import Function, Module, Op, Role, Value
from moaic.ir.layout import DEFERRED, PARTIAL, REPLICATED, Mesh, Replicated, Sharded, State
from moaic.ir.op_names import SHARD
from moaic.ir.ops import Kind, check_known, flops_of, kind_of, rule_of
from moaic.ir.ring_attention import rings_for
from moaic.ir.rules import Rule, Strategy, fits
from moaic.passes.transforms.dce import without_dead_ops

COLLECTIVE = {change: name for name, change in COLLECTIVES.items()}
"""By what it finds and what it leaves."""


class UnshardableOp(Diagnostic):
    """An axis cannot pass: an op needs whole what the axis has split, and the message names the op."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A mesh axis that is being put in."""

    name: str
    size: int
    is_loop: bool = False


Versions = tuple[State, ...]
"""The states in which a value exists already, the one it was made in first."""

Chooser = Callable[[Function, int, Sequence[Versions], Sequence[Strategy]], Strategy]
"""Picks one of the candidate strategies for op number i of a function, given the versions of its operands."""

ResultStates = Callable[[Role, Value, State], State]
"""The wanted state of a main result, given its role and the state in which it is made."""

ParamStates = Callable[[Function], tuple[State, ...]]
"""The states in which a function wants its parameters, where that is fixed from outside."""


@dataclass(frozen=True, slots=True)
class Partitioned:
    """A module with the axis in its types, and what had to be computed before the first micro-batch."""

    module: Module
    pre_flops: int
    pre_op: Op | None
    """The op that asked for the most expensive unsplit value."""


def partition(
    module: Module,
    axis: Axis,
    inputs: Sequence[State],
    results: ResultStates,
    choose: Chooser,
    callee_params: ParamStates | None = None,
    most_early: float = float("inf"),
) -> Partitioned:
    """`module` with `axis` in every type.

    `inputs` are the states of the main function's parameters; in time those of their parts, while the parameters stay
    whole. A backward waits for what would take more than `most_early` FLOPs to make early. Raises UnshardableOp where
    the axis cannot pass.
    """
    mesh = module.mesh.with_axis(axis.name, axis.size)
    work = _Work(module, axis, mesh, choose, callee_params, most_early)
    main = work.function(module.main, tuple(inputs), results)
    functions = (*work.made.values(), main)
    pre_op = max(work.asked, key=lambda op: work.asked[op], default=None)
    return Partitioned(without_dead_ops(Module(functions, mesh)), work.asked.total(), pre_op)


@dataclass(slots=True)
class _Work:
    """What the functions of one module share while an axis is put in."""

    module: Module
    axis: Axis
    mesh: Mesh
    choose: Chooser
    callee_params: ParamStates | None
    most_early: float
    made: dict[tuple[str, tuple[State, ...]], Function] = field(
        default_factory=dict[tuple[str, tuple[State, ...]], Function]
    )
    cuts: dict[tuple[str, tuple[State, ...]], tuple[State, ...]] = field(
        default_factory=dict[tuple[str, tuple[State, ...]], tuple[State, ...]]
    )
    asked: Counter[Op] = field(default_factory=Counter[Op])
    """FLOPs that run unsplit before the first micro-batch, by the op that asked for what they make."""

    def specialised(self, name: str, states: tuple[State, ...]) -> Function:
        """The callee for operands in these states, made on first use."""
        key = (name, states)
        if key not in self.made:
            function = self.function(self.module.function(name), states, None)
            taken = {made.name for made in self.made.values()}
            count = 1
            while (unique := name if count == 1 else f"{name}.{count}") in taken:
                count += 1
            self.made[key] = replace(function, name=unique)
        return self.made[key]

    def cut_before(self, name: str, states: tuple[State, ...]) -> tuple[State, ...]:
        """The operand states with those split that the callee would only cut itself: one cut serves all calls."""
        if (name, states) not in self.cuts:
            self.cuts[name, states] = self._cut_before(name, states)
        return self.cuts[name, states]

    def _cut_before(self, name: str, states: tuple[State, ...]) -> tuple[State, ...]:
        callee = self.specialised(name, states)
        read: dict[Value, set[State | None]] = {}
        for op in (callee.ops[i] for i in sorted(backward_slice(callee, callee.results))):
            for value in op.inputs():
                cut = op.name == SHARD and op.attrs["axis"] == self.axis.name
                read.setdefault(value, set()).add(op.results[0].type.layout.state(self.axis.name) if cut else None)
        found = [read.get(param, {None}) for param in callee.params]
        better = tuple(
            next(iter(cuts)) or state if len(cuts) == 1 else state for cuts, state in zip(found, states, strict=True)
        )
        if better == states:
            return states
        del self.made[name, states]
        return better

    def function(self, function: Function, states: tuple[State, ...], results: ResultStates | None) -> Function:
        once: Mapping[Op, Op | None] = {}
        while True:
            work = _Rewriter(self, function, states, once)
            made = work.run(results)
            if not (twice := work.twice(made)):
                self.asked.update(work.asked)
                return made
            once = {**once, **{op: work.asking.get(op) for op in twice}}

    def rounds(self, op: Op) -> bool:
        """Whether an op, or any of those of a function that it calls, may round otherwise for a part."""
        if op.name != "call":
            return rounds(op)
        return any(map(self.rounds, self.module.function(op.callee).ops))


class _Rewriter:
    """Rewrites one function: every value of the old one has one or more versions, by state, in the new one.

    `once` are ops that are not done for other parts too: these are cut from the whole. Those for which somebody asks
    before the first part are done whole.
    """

    def __init__(
        self, work: _Work, function: Function, states: tuple[State, ...], once: Mapping[Op, Op | None]
    ) -> None:
        self.work = work
        self.old = function
        self.axis = work.axis
        self.ops: list[Op] = []
        self.versions: dict[Value, dict[State, Value]] = {}
        self.primary: dict[Value, State] = {}
        self.producer = {result: i for i, op in enumerate(function.ops) for result in op.results}
        self.params = tuple(self._define(p, s) for p, s in zip(function.params, states, strict=True))
        self.at: Op | None = None
        self.once = once
        self.done = defaultdict[Op, list[Op]](list)
        """By op, the new ones that do the same, for the whole or for parts."""
        self.asking: dict[Op, Op] = {}
        self.asked = Counter[Op]()

    def run(self, results: ResultStates | None) -> Function:
        if self.axis.is_loop and results is not None:
            self._cut_into_parts()
        roles = {value: self.old.result_role(i) for i, value in enumerate(self.old.results)}
        for index, op in enumerate(self.old.ops):
            self.at = op
            if op.name == "call":
                self._call(op)
            else:
                self._op(index, op)
            for value in op.results:
                if value in roles:
                    self._result(value, roles[value], results)
        made = [self._result(value, self.old.result_role(i), results) for i, value in enumerate(self.old.results)]
        return replace(self.old, params=self.params, ops=tuple(self.ops), results=tuple(made))

    def twice(self, made: Function) -> list[Op]:
        """Ops that are done for the whole and for parts, or for several kinds of parts, and may round otherwise."""
        live = {made.ops[index] for index in backward_slice(made, made.results)}
        return [op for op, news in self.done.items() if len(live.intersection(news)) > 1 and self.work.rounds(op)]

    def _do(self, op: Op, new: Op) -> None:
        self.ops.append(new)
        self.done[op].append(new)

    def _cut_into_parts(self) -> None:
        for value in self.old.params:
            part = self.primary[value]
            if part != REPLICATED:
                self.versions[value] = {REPLICATED: replace_type(self.versions[value][part], value)}
                self.convert(value, part)
        self.params = tuple(self.versions[value][REPLICATED] for value in self.old.params)

    def _result(self, value: Value, role: Role, results: ResultStates | None) -> Value:
        have = self.primary[value]
        if results is None:
            return self.versions[value][have]
        want = results(role, value, have)
        if self.axis.is_loop:
            want = REPLICATED if REPLICATED in self.versions[value] else DEFERRED
        return self.convert(value, want)

    def _define(self, old: Value, state: State) -> Value:
        new = Value(self._typed(old, state), old.name)
        self.versions[old] = {state: new}
        self.primary[old] = state
        return new

    def _typed(self, old: Value, state: State):
        layout_state = REPLICATED if state == DEFERRED else state
        return old.type.with_layout(old.type.layout.with_state(self.axis.name, layout_state))

    def _op(self, index: int, op: Op) -> None:
        check_known(op)
        rule = rule_of(op)
        inputs = list(op.inputs())
        versions = [(self.primary[value], *self.versions[value]) for value in inputs]
        candidates = self.candidates(op, rule, inputs)
        chosen = self.work.choose(self.old, index, versions, candidates)
        if (asking := self.once.get(op)) is not None:
            self._make_whole(op, chosen.results, asking)
        else:
            self._emit(op, inputs, chosen)

    def candidates(self, op: Op, rule: Rule, inputs: Sequence[Value]) -> list[Strategy]:
        """Every strategy that the operands' states suggest; the replicated one last."""
        n = self.axis.size
        found: dict[Strategy, None] = {}
        for i, value in enumerate(inputs):
            for state in self.versions[value]:
                strategy = rule.following(rule.operands[i], state, n)
                if strategy is not None and self._fits(op, inputs, strategy):
                    found[strategy] = None
        for linear in rule.linear:
            if any(PARTIAL in self.versions[inputs[i]] for i in linear):
                found[rule.by_linearity(linear)] = None
        found[rule.replicated()] = None
        return list(found)

    def _fits(self, op: Op, inputs: Sequence[Value], strategy: Strategy) -> bool:
        pairs = [*zip(inputs, strategy.operands, strict=True), *zip(op.results, strategy.results, strict=True)]
        return all(fits(value.type, self.axis.name, state, self.work.mesh) for value, state in pairs)

    def _emit(self, op: Op, inputs: Sequence[Value], strategy: Strategy) -> None:
        wanted = strategy.operands
        results = strategy.results
        unsplit = self.axis.is_loop and all(state == REPLICATED for state in wanted)
        if unsplit and any(REPLICATED not in self.versions[value] for value in inputs):
            if any(isinstance(self.primary[value], Sharded) for value in inputs):
                self._make_whole(op, results, op)
                return
            wanted = tuple(DEFERRED for _ in wanted)
            results = tuple(DEFERRED for _ in results)
        mapping = self._operands(inputs, wanted)
        new = [self._define(old, state) for old, state in zip(op.results, results, strict=True)]
        ring = rings_for(op, self.axis.size, self.axis.name).get(strategy, op)
        self._do(op, _rebuild(ring, mapping, tuple(new)))

    def _make_whole(self, op: Op, results: Sequence[State], asking: Op) -> None:
        """Makes the results of `op` whole, and cuts from them the parts that were to be made."""
        self._clone_cone(op.results, asking)
        for result, state in zip(op.results, results, strict=True):
            self.primary[result] = state if isinstance(state, Sharded) else REPLICATED
            self.convert(result, self.primary[result])

    def _operands(self, inputs: Sequence[Value], wanted: Sequence[State]) -> list[Value]:
        return [self.convert(value, state) for value, state in zip(inputs, wanted, strict=True)]

    def _call(self, op: Op) -> None:
        inputs = list(op.inputs())
        wanted = self._call_states(op, inputs)
        if self.work.callee_params is None:
            wanted = self.work.cut_before(op.callee, wanted)
        operands = self._operands(inputs, wanted)
        callee = self.work.specialised(op.callee, wanted)
        states = [self._state_of(value) for value in callee.results]
        if (asking := self.once.get(op)) is not None:
            self._make_whole(op, states, asking)
            return
        late = any(state == DEFERRED for state in wanted)
        new = [
            self._define(old, DEFERRED if late and state == REPLICATED else state)
            for old, state in zip(op.results, states, strict=True)
        ]
        self._do(op, replace(op, operands=tuple(operands), results=tuple(new), attrs={"callee": callee.name}))

    def _call_states(self, op: Op, inputs: Sequence[Value]) -> tuple[State, ...]:
        if self.work.callee_params is not None:
            return self.work.callee_params(self.work.module.function(op.callee))
        states = [self.primary[value] for value in inputs]
        if not self.axis.is_loop or any(isinstance(state, Sharded) for state in states):
            return tuple(state if isinstance(state, Sharded) else REPLICATED for state in states)
        return tuple(REPLICATED if REPLICATED in self.versions[value] else DEFERRED for value in inputs)

    def _state_of(self, value: Value) -> State:
        return value.type.layout.state(self.axis.name)

    def convert(self, value: Value, want: State) -> Value:
        """The version of `value` in the state `want`, made here if it does not exist yet."""
        versions = self.versions[value]
        if want not in versions:
            versions[want] = self._make(value, want)
        return versions[want]

    def _make(self, value: Value, want: State) -> Value:
        versions = self.versions[value]
        have = REPLICATED if REPLICATED in versions else self.primary[value]
        if self.axis.is_loop:
            if want == DEFERRED and REPLICATED in versions:
                return versions[REPLICATED]
            if want != DEFERRED and have != REPLICATED:
                if self._waits(value):
                    versions[REPLICATED] = self.convert(value, DEFERRED)
                else:
                    self._clone_cone((value,), self.at)
                return versions[want] if want in versions else self._make(value, want)
        elif PARTIAL in versions and isinstance(want, Sharded) and REPLICATED not in versions:
            have = PARTIAL
        if have == REPLICATED and isinstance(want, Sharded) and (rebuilt := self._rebuilt(value, want)) is not None:
            return rebuilt
        return self._collective(value, have, want)

    def _waits(self, value: Value) -> bool:
        """Whether a backward had better wait for the end of all forwards than have `value` made early."""
        if self.at is None or self.at.loc.side != "backward" or isinstance(self.primary[value], Sharded):
            return False
        return sum(flops_in(self.work.module, self.old.ops[i]) for i in self._cone((value,))) > self.work.most_early

    def _collective(self, value: Value, have: State, want: State) -> Value:
        if isinstance(have, Sharded) and want == PARTIAL:
            self.convert(value, REPLICATED)
            have = REPLICATED
        source = self.versions[value][have]
        new = Value(self._typed(value, want), value.name)
        name = COLLECTIVE[_kind(have), _kind(want)]
        loc = self.at.loc if self.at is not None else self.old.ops[0].loc
        self.ops.append(Op(name, (source,), (new,), {"axis": self.axis.name}, loc))
        return new

    def _rebuilt(self, value: Value, want: State) -> Value | None:
        """`value` made in parts from parts, unless its op is heavy: so a cut moves up to where the value enters."""
        index = self.producer.get(value)
        if index is None:
            return None
        op = self.old.ops[index]
        if kind_of(op) in (Kind.HEAVY, Kind.INSTRUCTION) or op in self.once:
            return None
        rule = rule_of(op)
        inputs = list(op.inputs())
        strategy = rule.following(rule.results[op.results.index(value)], want, self.axis.size)
        if strategy is None or not self._fits(op, inputs, strategy) or PARTIAL in strategy.results:
            return None
        if any(
            REPLICATED not in self.versions[v] and s not in self.versions[v]
            for v, s in zip(inputs, strategy.operands, strict=True)
        ):
            return None
        operands = self._operands(inputs, strategy.operands)
        results = [Value(self._typed(o, s), o.name) for o, s in zip(op.results, strategy.results, strict=True)]
        for old, state, new in zip(op.results, strategy.results, results, strict=True):
            self.versions[old].setdefault(state, new)
        self._do(op, _rebuild(op, operands, tuple(results)))
        return self.versions[value][want]

    def _clone_cone(self, targets: Sequence[Value], asking: Op | None) -> None:
        """Make `targets` whole before the first micro-batch, from what is whole from the start; price it."""
        for index in self._cone(targets):
            op = self.old.ops[index]
            operands = [self.versions[value][REPLICATED] for value in op.inputs()]
            results = tuple(Value(self._typed(old, REPLICATED), old.name) for old in op.results)
            clone = _rebuild(op, operands, results)
            if op.name == "call":
                clone = replace(clone, attrs={"callee": self._whole_callee(op)})
            self._do(op, clone)
            if asking is not None:
                self.asking[op] = asking
                self.asked[asking] += flops_in(self.work.module, op)
            for old, new in zip(op.results, results, strict=True):
                self.versions.setdefault(old, {}).setdefault(REPLICATED, new)
                self.primary.setdefault(old, REPLICATED)

    def _whole_callee(self, op: Op) -> str:
        states: tuple[State, ...] = tuple(REPLICATED for _ in op.inputs())
        return self.work.specialised(op.callee, states).name

    def _cone(self, targets: Sequence[Value]) -> list[int]:
        """Ops that must be run again, whole, to have `targets` early."""
        waiting = [value for value in targets if REPLICATED not in self.versions.get(value, {})]
        needed: set[int] = set()
        while waiting:
            value = waiting.pop()
            index = self.producer.get(value)
            if index is None:
                raise self._barrier(value)
            if index not in needed:
                needed.add(index)
                waiting += [v for v in self.old.ops[index].inputs() if REPLICATED not in self.versions.get(v, {})]
        return sorted(needed)

    def _barrier(self, value: Value) -> UnshardableOp:
        assert self.at is not None
        what = f"`%{value.name}`" if value.name else f"a value of {list(value.type.shape)}"
        return barrier(self.axis, self.at, f"{what} is split where it enters @{self.old.name}")


def _kind(state: State) -> type[State]:
    """Its class; what is deferred is replicated in the end."""
    return Replicated if state == DEFERRED else type(state)


def replace_type(value: Value, old: Value) -> Value:
    """`value` with the type of `old`."""
    return Value(old.type, value.name)


def barrier(axis: Axis, op: Op, why: str) -> UnshardableOp:
    """The message that names the op in the way of `axis`."""
    where = f" in {op.loc.module}" if op.loc.module else ""
    line = f' ("{op.loc.file}":{op.loc.line})' if op.loc.file else ""
    return UnshardableOp(
        f"{axis.name}={axis.size} cannot pass {op.name}{where}{line}: it needs the whole batch, and {why}"
    )


def flops_in(module: Module, op: Op) -> int:
    """FLOPs of an op, those of a called function included."""
    if op.name != "call":
        return flops_of(op)
    return sum(flops_in(module, inner) for inner in module.function(op.callee).ops)


def function_flops(module: Module, function: Function) -> int:
    return sum(flops_in(module, op) for op in function.ops)


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
