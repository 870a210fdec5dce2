"""SPMD partitioner for one mesh axis: a strategy per op, the resharding between them, all of it written into the types.

The ranks of a mesh axis run side by side; the parts of a loop axis (`mb`) run one after the other. Over a loop axis a
complete sum exists only after the last micro-batch: such a value is DEFERRED. A value that a micro-batch needs
replicated must be computed *before* the first one: its backward slice runs on the unsharded batch, and its FLOPs are
returned. Where these are many and only a backward op needs the value, all backwards are deferred until the last
forward.

No value is computed twice if the two could round differently: a value that equals a maximum must equal it in every
shard. A shard of a replicated value is cut from it; only ops that never round run both replicated and sharded.

`function_partitioner` rewrites one function; this file specializes the functions of a module for the states of their
operands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from moaic.ir.backward_slice import backward_slice
from moaic.ir.exact import rounds
from moaic.ir.graph import Function, Module, Op, Value
from moaic.ir.layout import State
from moaic.ir.op_names import SHARD
from moaic.passes.sharding.axis import Axis, ParamStates, ResultStates, StrategySelector
from moaic.passes.sharding.function_partitioner import FunctionPartitioner, Insertion
from moaic.passes.transforms.dce import without_dead_ops

CalleeKey = tuple[str, tuple[State, ...]]
"""A function of the old module and the states of its operands."""


@dataclass(frozen=True, slots=True)
class Partitioned:
    """A module with the axis in its types, and what had to be computed before the first micro-batch."""

    module: Module
    early_flops: int
    early_op: Op | None
    """The op whose operands cost the most FLOPs before the first micro-batch."""


def partition(
    module: Module,
    axis: Axis,
    states: Mapping[Value, State],
    results: ResultStates,
    select: StrategySelector,
    callee_params: ParamStates | None = None,
    max_early_flops: float = float("inf"),
) -> Partitioned:
    """`module` with `axis` in every type.

    `states` are those of the main function's parameters; over a loop axis those of one part, while the parameters
    themselves stay replicated. Results of ops among them are made so where that costs nothing. A backward op is
    deferred rather than have more than `max_early_flops` computed before the first micro-batch. Raises UnshardableOp.
    """
    mesh = module.mesh.with_axis(axis.name, axis.size)
    partitioner = _ModulePartitioner(Insertion(module, axis, mesh, select, states, callee_params, max_early_flops))
    main = partitioner.partitioned(module.main, tuple(states[param] for param in module.main.params), results)
    functions = (*partitioner.callees.values(), main)
    early = partitioner.early_flops
    early_op = max(early, key=lambda op: early[op], default=None)
    return Partitioned(without_dead_ops(Module(functions, mesh)), early.total(), early_op)


@dataclass(slots=True)
class _ModulePartitioner:
    """The new functions of a module: each callee once for every tuple of operand states that calls pass."""

    insertion: Insertion
    callees: dict[CalleeKey, Function] = field(default_factory=dict[CalleeKey, Function])
    caller_states: dict[CalleeKey, tuple[State, ...]] = field(default_factory=dict[CalleeKey, tuple[State, ...]])
    early_flops: Counter[Op] = field(default_factory=Counter[Op])
    """FLOPs before the first micro-batch, by the op that needs their result."""

    def specialized(self, name: str, states: tuple[State, ...]) -> Function:
        """The callee for operands in these states, made on first use."""
        key = (name, states)
        if key not in self.callees:
            function = self.partitioned(self.insertion.module.function(name), states, None)
            taken = {callee.name for callee in self.callees.values()}
            count = 1
            while (unique := name if count == 1 else f"{name}.{count}") in taken:
                count += 1
            self.callees[key] = replace(function, name=unique)
        return self.callees[key]

    def sharded_by_caller(self, name: str, states: tuple[State, ...]) -> tuple[State, ...]:
        """`states`, but sharded where all that the callee does with a replicated operand is to shard it.

        The caller then shards the value once for all of its calls:

            %y = call @layer %x : f32[8{dp}, 4]        # @layer: %s = moai.shard %p {axis = "dp"} : f32[8{dp}, 4]
            %z = call @layer %x : f32[8{dp}, 4]
        becomes
            %s = moai.shard %x {axis = "dp"} : f32[8{dp}, 4]
            %y = call @layer %s : f32[8{dp}, 4]        # and %z likewise
        """
        if (name, states) not in self.caller_states:
            self.caller_states[name, states] = self._sharded_by_caller(name, states)
        return self.caller_states[name, states]

    def _sharded_by_caller(self, name: str, states: tuple[State, ...]) -> tuple[State, ...]:
        callee = self.specialized(name, states)
        uses: dict[Value, set[State | None]] = {}
        for op in (callee.ops[i] for i in sorted(backward_slice(callee, callee.results))):
            for value in op.inputs():
                uses.setdefault(value, set()).add(self._state_sharded_to(op))
        param_uses = [uses.get(param, {None}) for param in callee.params]
        better = tuple(
            next(iter(wanted)) or state if len(wanted) == 1 else state
            for wanted, state in zip(param_uses, states, strict=True)
        )
        if better == states:
            return states
        del self.callees[name, states]
        return better

    def _state_sharded_to(self, op: Op) -> State | None:
        """The state into which `op` shards its operand on this axis; None for any other op."""
        axis = self.insertion.axis.name
        is_shard = op.name == SHARD and op.attrs["axis"] == axis
        return op.results[0].type.layout.state(axis) if is_shard else None

    def partitioned(self, function: Function, states: tuple[State, ...], results: ResultStates | None) -> Function:
        """`function` with the axis in its types, computing nothing twice that could round differently.

        Which ops that concerns is known only once the function is written, so it is written again until none is left.
        """
        computed_once: Mapping[Op, Op | None] = {}
        while True:
            partitioner = FunctionPartitioner(self.insertion, self, function, states, computed_once)
            result = partitioner.run(results)
            duplicates = [op for op in partitioner.duplicates(result) if self._rounds(op)]
            if not duplicates:
                self.early_flops.update(partitioner.early_flops)
                return result
            computed_once = {**computed_once, **{op: partitioner.early_reader.get(op) for op in duplicates}}

    def _rounds(self, op: Op) -> bool:
        """Whether an op, or any op of a function that it calls, may round differently on a shard."""
        if op.name != "call":
            return rounds(op)
        return any(map(self._rounds, self.insertion.module.function(op.callee).ops))
