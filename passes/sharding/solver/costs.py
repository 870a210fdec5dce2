"""What the layout solver pays: seconds of compute, of conversions between states, and the worth of memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from math import log2, prod

from moaic.ir.attention import is_causal
from moaic.ir.graph import Op, Value
from moaic.ir.layout import PARTIAL, REPLICATED, Mesh, Sharded, State, splits_dim
from moaic.ir.localize import coordinate_dims
from moaic.ir.ops import Kind, declaration_of, flops_of, kind_of
from moaic.ir.ring_attention import is_balanced, is_ring, rings_for
from moaic.ir.rules import Strategy
from moaic.ir.types import FLOATING
from moaic.passes.loop_axes import MICRO_BATCHES
from moaic.passes.perf import optimizer
from moaic.passes.perf.machine import Machine, sent_share
from moaic.passes.perf.ring_attention import block_bytes, gradient_bytes, handed_on, merged_bytes

SPELLED_OUT = 2
"""Times the work of causal attention that attention under a mask does."""


class ValueRole(Enum):
    """What a value is to the memory of a step."""

    ACTIVATION = "activation"
    WEIGHT = "weight"
    """A parameter, or made of parameters without a heavy op."""
    GRADIENT = "gradient"
    """What ends beside a parameter."""


@dataclass(frozen=True, slots=True)
class CostCoefficients:
    """Rates of one worker and its links, in units per second, assumed unless said; and what memory is worth."""

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
    unsplit: float = 1e-3
    """Seconds per step that a whole matrix costs, however small: an axis that was asked for is used."""
    saved: float = 1.0
    """The same for a byte that the forward saves for the backward."""


def prices_of(machine: Machine) -> CostCoefficients:
    """The rates of a machine as far as they are known, in steps of two: layouts must not change with each measuring."""
    assumed = CostCoefficients()
    known = replace(
        assumed,
        flops=_step(machine.rate("mm", "f32").value),
        memory=_step(machine.bandwidth.value),
        local=_step(machine.call_overhead.value),
    )
    link = machine.links.get("all_gather")
    if link is None:
        return known
    sent = link.rate.value * sent_share("all_gather", link.ranks)
    return replace(known, link=_step(sent), latency=_step(link.latency.value + CUTS * machine.call_overhead.value))


CUTS = 2
"""Instructions more that a collective makes of a program: itself, and the code that it cuts in two."""


def _step(value: float) -> float:
    return 2.0 ** round(log2(value)) if value > 0 else 0.0


@dataclass(frozen=True, slots=True)
class LayoutCosts:
    """Costs on a mesh, for an axis of n ranks that the mesh does not have yet."""

    prices: CostCoefficients
    mesh: Mesh
    n: int

    def runs(self, *values: Value) -> int:
        """Times per step that something with these operands and results runs."""
        in_parts = any(value.type.layout.state(MICRO_BATCHES) != REPLICATED for value in values)
        return self.mesh.size(MICRO_BATCHES) if in_parts else 1

    def local_bytes(self, value: Value) -> int:
        """Bytes on one rank that holds `value` whole on the new axis, for one run."""
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
            split = any(isinstance(state, Sharded) for state in (*strategy.operands, *strategy.results))
            share = 1 / self.n if split else 1.0
            seconds = flops_of(op) / parts / self.prices.flops * share
            if is_ring(op):
                return runs * self._around(op, seconds, share, self.mesh.size(str(op.attrs["axis"])))
            if ring := rings_for(op, self.n).get(strategy):
                return runs * self._around(ring, seconds, share, self.n)
            return runs * seconds * (SPELLED_OUT if _is_placed(op, strategy) else 1)
        if kind is Kind.VIEW:
            return 0.0
        link_passes = declaration_of(op).link_passes
        sends = link_passes and op.attrs["axis"] != MICRO_BATCHES
        rate = self.prices.link / link_passes if sends else self.prices.memory
        return (
            runs
            * sum(self._part(value, state) for value, state in zip(op.results, strategy.results, strict=True))
            / rate
        )

    def _around(self, op: Op, seconds: float, share: float, ranks: int) -> float:
        """Seconds of a ring for what takes each rank so long on average.

        All wait for the rank that has most to do, bring blocks round, each a share of what a rank holds without the
        new axis, and add up.
        """
        slowest = seconds * (1 if is_balanced(op) else SPELLED_OUT)
        block, gradients = ([share * each for each in of(op, self.mesh)] for of in (block_bytes, gradient_bytes))
        sent = (self.prices.latency + nbytes / self.prices.link for nbytes in handed_on(block, gradients, ranks))
        added = share * merged_bytes(op, self.mesh, ranks) / self.prices.memory
        return slowest + sum(sent) + added + ranks * self.prices.local

    def _part(self, value: Value, state: State) -> float:
        return self.local_bytes(value) / (self.n if isinstance(state, Sharded) else 1)

    def conversion(
        self, value: Value, have: State, want: State, standing: ValueRole = ValueRole.ACTIVATION
    ) -> float | None:
        """Seconds per step to bring `value` into another state; None where that is never wanted.

        Nothing becomes a pending sum, and a weight that is split is used in splits: to gather it is what `dp` is for.
        A second copy of a weight and a gradient that is a pending sum to the end are memory that is held.
        """
        if have == want:
            return 0.0
        if want == PARTIAL or (standing is ValueRole.WEIGHT and isinstance(have, Sharded) and want == REPLICATED):
            return None
        runs, size = self.runs(value), self.local_bytes(value)
        if have == REPLICATED:
            return runs * (self.prices.local + size / self.n / self.prices.memory)
        held = 0.0
        if standing is ValueRole.WEIGHT:
            held = self.prices.held * size / self.n
        elif standing is ValueRole.GRADIENT and have == PARTIAL:
            held = self.prices.held * size
        return runs * (self.prices.latency + (self._sent(size, have, want) + held) / self.prices.link)

    def _sent(self, size: int, have: State, want: State) -> float:
        share = size * (self.n - 1) / self.n
        if have == PARTIAL:
            return 2 * share if want == REPLICATED else share
        return share if want == REPLICATED else share / self.n

    def resting(self, value: Value, state: State) -> float:
        """The worth of the memory of a parameter at rest."""
        if value.type.dtype not in FLOATING:
            return 0.0
        unsplit = self.prices.unsplit if state == REPLICATED and len(value.type.shape) > 1 else 0.0
        return unsplit + optimizer.COPIES * self.prices.held * self._part(value, state) / self.prices.link

    def saving(self, value: Value, state: State) -> float:
        """The worth of the memory of a value that waits for another call, in one micro-batch."""
        return self.prices.saved * self._part(value, state) / self.prices.link


def _is_placed(op: Op, strategy: Strategy) -> bool:
    """Whether a rank has some rows of causal attention, under a mask: then nothing is skipped."""
    if not is_causal(op):
        return False
    states = dict(zip((*op.inputs(), *op.results), (*strategy.operands, *strategy.results), strict=True))
    return any(splits_dim(states[value], dim) for value, dim in coordinate_dims(op))
