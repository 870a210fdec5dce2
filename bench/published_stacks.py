"""What software stacks do differently from moaic's own programs: declared for each stack, and for no row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from moaic.ir.graph import Function
from moaic.ir.layout import Mesh
from moaic.passes.config import Config
from moaic.passes.estimate.memory import Memory
from moaic.passes.estimate.step_time import FunctionSeconds
from moaic.passes.perf.machine import Machine
from moaic.passes.perf.numbers import Number


@dataclass(frozen=True, slots=True)
class Stack:
    """What a software stack does differently from moaic's own programs."""

    light: float = 1.0
    """Traffic of kernels between matrix products, relative to fused ones."""
    step: float = 0.0
    """Seconds of each step outside the graph: data, logging, the launch of an optimizer."""
    messages: float = 1.0
    """Share of messages that are left where parameters of a layer are sent together."""
    exposed: float = 1.0
    """Share of communication inside a host that products of the same layer do not hide."""
    selective: float = 0.0
    """Share of the forward that `selective` recomputes, and of what is kept that it does not keep."""
    kept: float = 1.0
    """Bytes of activations relative to the planner's set, which keeps what is cheap to recompute out."""
    gradients: int = 0
    """Bytes per parameter of gradients beside their sums in float32."""

    def nbytes(self, memory: Memory, config: Config) -> float:
        """Bytes of a worker whose parameters and sums are in float32, and copies of parameters in two bytes."""
        is_sharded = config.distribute_param != "none"
        elements = memory.gradients / 4 * (config.dp if is_sharded else 1)
        held = memory.parameters + memory.optimizer + (2 + 4) * elements
        if self.kept == 1.0 or memory.joint < held:
            return memory.peak + self.gradients * elements
        return max(memory.step, held + self.kept * (memory.joint - held)) + self.gradients * elements

    def on(self, machine: Machine) -> Machine:
        """The machine as this stack uses its links."""
        levels = tuple(
            replace(
                level,
                latency=Number(self.messages * level.latency.value, level.latency.source),
                rate=Number(level.rate.value / (1.0 if is_last else self.exposed), level.rate.source),
            )
            for level in machine.levels
            for is_last in [level is machine.levels[-1]]
        )
        # All of these have a communicator, and with it a stream, for each axis.
        return replace(machine, levels=levels, stream_per_axis=True)


STACKS: Final[Mapping[str, Stack]] = {
    "LF": Stack(light=0.6, step=0.036, messages=0.15),
    "TT": Stack(messages=0.15, selective=0.5),
    "NT": Stack(kept=1.65, gradients=2),
    "ML20": Stack(light=1.4),
    "MLH": Stack(messages=0.15, exposed=0.25),
    "MLK": Stack(messages=0.15, selective=0.15),
}
"""By source: what each stack does, if it is not `USUAL`.

LF's traffic and seconds per step were fitted with the constants of the GPUs. Nanotron sends each parameter by itself,
which its errors on 512 GPUs say, and runs op by op: counted by hand, its layers keep 1.4 to 1.7 times what the planner
keeps. The Megatron of 2020 fuses little: what fused stacks move is 0.6 to 0.8 of that.
"""

USUAL: Final = Stack(messages=0.15)


def on_stack(stack: Stack, seconds: FunctionSeconds) -> FunctionSeconds:
    """The seconds of functions whose light kernels are those of a stack."""

    def slower(function: Function, mesh: Mesh) -> Mapping[str, Number]:
        spent = seconds(function, mesh)
        return {**spent, "light": Number(stack.light * spent["light"].value, spent["light"].source)}

    return slower
