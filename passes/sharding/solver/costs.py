"""Costs of the layout solver in seconds per step: compute, resharding, and memory that is held."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from math import log2, prod

from moaic.ir.attention import causal_divisor, is_causal
from moaic.ir.collectives import COLLECTIVE_FOR, PASSES_SENT, sent_share
from moaic.ir.graph import Op, Value
from moaic.ir.layout import PARTIAL, REPLICATED, Mesh, Sharded, State, splits_dim
from moaic.ir.localize import coordinate_dims
from moaic.ir.op_names import ALL_GATHER
from moaic.ir.ops import Kind, flops_of, kind_of
from moaic.ir.ring_attention import is_balanced, is_ring, rings_for
from moaic.ir.rules import Strategy
from moaic.ir.types import FLOATING
from moaic.passes.loop_axes import MICRO_BATCHES
from moaic.passes.perf import optimizer
from moaic.passes.perf.machine import Machine
from moaic.passes.perf.ring_attention import block_bytes, gradient_bytes, handed_on, merged_bytes

MASKED = causal_divisor(True)
"""Times the work of causal attention that attention under a mask, which skips nothing, does."""


class ValueRole(Enum):
    """The class of memory that a value takes."""

    ACTIVATION = "activation"
    WEIGHT = "weight"
    """A parameter, or made of parameters without a heavy op."""
    GRADIENT = "gradient"
    """A main result that belongs to a parameter."""


@dataclass(frozen=True, slots=True)
class CostCoefficients:
    """Rates of one worker and its links, in units per second, and the cost of memory. Defaults are assumed."""

    flops: float = 100e9
    memory: float = 10e9
    """Bytes read or written."""
    link: float = 4e9
    """Bytes sent in a collective."""
    latency: float = 100e-6
    """Seconds to begin a collective, and for the cut that it makes into compiled code."""
    local: float = 20e-6
    """Seconds to begin an instruction that sends nothing."""
    held: float = 10.0
    """Bytes that may be sent per step to hold one byte of parameter, gradient and optimizer state less."""
    unsharded: float = 1e-3
    """Seconds per step that an unsharded matrix costs, however small: an axis that was asked for is used."""
    saved: float = 1.0
    """The same for a byte that the forward saves for the backward."""


def coefficients_of(machine: Machine) -> CostCoefficients:
    """The rates of a machine rounded to powers of two, so that layouts do not change with each measurement."""
    assumed = CostCoefficients()
    known = replace(
        assumed,
        flops=_step(machine.rate("mm", "f32").value),
        memory=_step(machine.bandwidth.value),
        local=_step(machine.call_overhead.value),
    )
    link = machine.links.get("all_gather")
    if link is not None:
        sent, latency = link.rate.value * sent_share(ALL_GATHER, link.ranks), link.latency.value
    elif machine.levels:
        # Layouts are chosen for the inner axes, which are inside one host where there are any hosts.
        sent, latency = machine.levels[0].rate.value, machine.levels[0].latency.value
    else:
        return known
    return replace(known, link=_step(sent), latency=_step(latency + CUTS * machine.call_overhead.value))


CUTS = 2
"""Instructions that a collective adds to a program: itself, and the second half of the segment that it cuts."""


def _step(value: float) -> float:
    return 2.0 ** round(log2(value)) if value > 0 else 0.0


@dataclass(frozen=True, slots=True)
class LayoutCosts:
    """Costs on a mesh, for an axis of n ranks that the mesh does not have yet."""

    coefficients: CostCoefficients
    mesh: Mesh
    n: int

    def runs(self, *values: Value) -> int:
        """Executions per step of an op with these operands and results: one per micro-batch if any has that axis."""
        in_parts = any(value.type.layout.state(MICRO_BATCHES) != REPLICATED for value in values)
        return self.mesh.size(MICRO_BATCHES) if in_parts else 1

    def local_bytes(self, value: Value) -> int:
        """Bytes of `value` on one rank, replicated on the new axis, for one execution."""
        return value.type.local_nbytes(self.mesh)

    def op(self, op: Op, strategy: Strategy) -> float:
        """Seconds per step of `op` under a strategy."""
        kind = kind_of(op)
        values = (*op.inputs(), *op.results)
        runs = self.runs(*values)
        if kind is Kind.HEAVY or is_ring(op):
            parts = prod(
                size for axis, size in self.mesh.axes if any(v.type.layout.state(axis) != REPLICATED for v in values)
            )
            sharded = any(isinstance(state, Sharded) for state in (*strategy.operands, *strategy.results))
            share = 1 / self.n if sharded else 1.0
            seconds = flops_of(op) / parts / self.coefficients.flops * share
            if is_ring(op):
                return runs * self._ring(op, seconds, share, self.mesh.size(str(op.attrs["axis"])))
            if ring := rings_for(op, self.n).get(strategy):
                return runs * self._ring(ring, seconds, share, self.n)
            return runs * seconds * (MASKED if _is_masked(op, strategy) else 1)
        if kind is Kind.VIEW:
            return 0.0
        sends = op.name in PASSES_SENT and op.attrs["axis"] != MICRO_BATCHES
        rate = self.coefficients.link / PASSES_SENT[op.name] if sends else self.coefficients.memory
        return (
            runs
            * sum(self._part(value, state) for value, state in zip(op.results, strategy.results, strict=True))
            / rate
        )

    def _ring(self, op: Op, seconds: float, share: float, ranks: int) -> float:
        """Seconds of ring attention whose compute takes `seconds` per rank on average.

        All ranks wait for the slowest; each passes on blocks, which are `share` of what a rank holds without the new
        axis, and adds up partial results.
        """
        slowest = seconds * (1 if is_balanced(op) else MASKED)
        block, gradients = (
            [share * nbytes for nbytes in sizes(op, self.mesh)] for sizes in (block_bytes, gradient_bytes)
        )
        sent = (
            self.coefficients.latency + nbytes / self.coefficients.link for nbytes in handed_on(block, gradients, ranks)
        )
        added = share * merged_bytes(op, self.mesh, ranks) / self.coefficients.memory
        return slowest + sum(sent) + added + ranks * self.coefficients.local

    def _part(self, value: Value, state: State) -> float:
        return self.local_bytes(value) / (self.n if isinstance(state, Sharded) else 1)

    def resharding(
        self, value: Value, have: State, want: State, role: ValueRole = ValueRole.ACTIVATION
    ) -> float | None:
        """Seconds per step to bring `value` into another state; None where that is not allowed.

        No value becomes partial, and a sharded weight is used sharded: `dp` is the axis that gathers weights. A second
        copy of a weight, and a gradient that stays partial to the end, cost the memory that they hold.
        """
        if have == want:
            return 0.0
        if want == PARTIAL or (role is ValueRole.WEIGHT and isinstance(have, Sharded) and want == REPLICATED):
            return None
        runs, size = self.runs(value), self.local_bytes(value)
        if have == REPLICATED:
            return runs * (self.coefficients.local + size / self.n / self.coefficients.memory)
        held = 0.0
        if role is ValueRole.WEIGHT:
            held = self.coefficients.held * size / self.n
        elif role is ValueRole.GRADIENT and have == PARTIAL:
            held = self.coefficients.held * size
        return runs * (self.coefficients.latency + (self._sent(size, have, want) + held) / self.coefficients.link)

    def _sent(self, size: int, have: State, want: State) -> float:
        """Bytes that a rank sends to reshard a value of `size` bytes; an all-to-all works on shards alone."""
        sent = PASSES_SENT[COLLECTIVE_FOR[type(have), type(want)]] * size * (self.n - 1) / self.n
        return sent / self.n if isinstance(have, Sharded) and isinstance(want, Sharded) else sent

    def persistent(self, value: Value, state: State) -> float:
        """Seconds per step that the memory of a parameter, its gradient and optimizer state costs."""
        if value.type.dtype not in FLOATING:
            return 0.0
        unsharded = self.coefficients.unsharded if state == REPLICATED and len(value.type.shape) > 1 else 0.0
        return unsharded + optimizer.COPIES * self.coefficients.held * self._part(value, state) / self.coefficients.link

    def saved(self, value: Value, state: State) -> float:
        """Seconds that the memory of a value saved for another call costs in one micro-batch."""
        return self.coefficients.saved * self._part(value, state) / self.coefficients.link


def _is_masked(op: Op, strategy: Strategy) -> bool:
    """Whether a rank computes some rows of causal attention, which takes a mask that skips nothing."""
    if not is_causal(op):
        return False
    states = dict(zip((*op.inputs(), *op.results), (*strategy.operands, *strategy.results), strict=True))
    return any(splits_dim(states[value], dim) for value, dim in coordinate_dims(op))
