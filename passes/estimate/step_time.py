"""Predicted seconds of a step: a roofline per kernel, latency and rate per collective, simulated in program order.

A kernel takes the longer of its arithmetic and its memory traffic, or the sum of both. CPU workers compute nothing
during a collective, so the times of one worker add up; where a machine overlaps collectives, only exposed time counts,
and what they cost the kernels beside them. Every stage of a pipeline has its own clock (`simulate`). A result carries
the worst source among the numbers that it depends on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from moaic.ir.attention import is_causal, query_key_value
from moaic.ir.collectives import COMMUNICATING
from moaic.ir.graph import Function, Module, Op
from moaic.ir.layout import Mesh
from moaic.ir.op_names import SEND
from moaic.ir.ops import declaration_of, flops_of
from moaic.ir.ring_attention import is_ring
from moaic.ir.types import DTYPE_BYTES
from moaic.passes.estimate.memory import FusedFunctions, trainables
from moaic.passes.estimate.per_rank import ends_of, owner_coordinates
from moaic.passes.estimate.simulate import simulate
from moaic.passes.lowering.plan import Plan
from moaic.passes.perf import optimizer
from moaic.passes.perf.fusion import Fused, FusedKernel
from moaic.passes.perf.kernel_text import kernel_text
from moaic.passes.perf.links import are_inside, group_along
from moaic.passes.perf.machine import Machine, MadeKernel, larger_side
from moaic.passes.perf.numbers import ZERO, MeasureSource, Number, total
from moaic.passes.perf.ring_attention import handed_on_in, merged_bytes, ranks_of, turns
from moaic.passes.perf.structural_hash import key_of

ROUNDING = 1e-9
"""Share of a step within which differences of sums are rounding errors."""

FunctionSeconds = Callable[[Function, Mesh], Mapping[str, Number]]


EXPECTED_STEPS: Final = 1000
"""Steps over which the time to compile is spread when plans are compared, if the user does not say."""

SECONDS_PER_OP: Final = 0.024
"""Of compiling a function: 8.1 s for 338 ops of a BERT with dropout, on one core of a Zen CPU."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of one step by part.

    Parts: `heavy` and `light` kernels, their `launch`, `collective`, `send`, `move`, `overhead`, `bubble` and
    `optimizer`.
    """

    parts: Mapping[str, Number]
    compiling: float = 0.0
    """Seconds that compiling the functions of the program takes one worker, once."""
    over_dp: float = 0.0
    """Seconds of all collectives over `dp` in a sketch, though something else may run beside them."""

    @property
    def seconds(self) -> Number:
        return total(self.parts.values())

    def of(self, part: str) -> float:
        """Seconds of one part; zero where there is none."""
        return self.parts.get(part, ZERO).value

    def price(self, steps: int) -> float:
        """Seconds of one of `steps` steps, with its share of the time to compile."""
        return self.seconds.value + self.compiling / steps


@dataclass(frozen=True, slots=True)
class Rates:
    """What describes a worker, and the seconds that functions take it."""

    machine: Machine
    seconds: FunctionSeconds


def function_seconds(machine: Machine, fused: FusedFunctions) -> FunctionSeconds:
    """Seconds of one call of a function, heavy and light kernels apart, cached per function."""
    known: dict[Function, Mapping[str, Number]] = {}

    def seconds(function: Function, mesh: Mesh) -> Mapping[str, Number]:
        if function not in known:
            known[function] = _function(fused(function, mesh), machine)
        return known[function]

    return seconds


def predict(plan: Plan, machine: Machine, seconds: FunctionSeconds) -> Prediction:
    """The whole step on equal workers: forward and backward as one, then the optimizer."""
    spent = program_seconds(plan.programs.joint, machine, seconds)
    optimizing = optimizer_seconds(plan, [machine] * plan.programs.joint.mesh.size("pp"))
    return Prediction({**spent, "optimizer": optimizing}, compile_seconds(plan.programs.joint))


def compile_seconds(program: Module) -> float:
    """Seconds that compiling the functions of a program takes, each once.

    That workers share them does not count: it would make more workers the cheaper choice for steps of some ten ops.
    """
    return SECONDS_PER_OP * sum(len(function.ops) for function in program.functions[:-1])


def program_seconds(program: Module, machine: Machine, seconds: FunctionSeconds) -> dict[str, Number]:
    """Seconds of the worker that ends last, by part; `bubble` is its wait for other workers."""
    functions = {function.name: function for function in program.functions}
    prices = {op: op_seconds(op, program.mesh, functions, machine, seconds) for op in program.main.ops}
    streams = {op: stream for op in prices if (stream := stream_of(op, machine)) is not None}
    run = simulate(
        program, {op: total(parts.values()).value for op, parts in prices.items()}, streams, machine.contention
    )
    spent: dict[str, list[Number]] = defaultdict(list)
    for op in run.done[run.last]:
        for part, number in prices[op].items():
            spent[part].append(Number(number.value / 2, number.source) if op.name == SEND else number)
    exposed = run.exposed[run.last]
    if exposed > 0:
        spent["collective"].append(Number(exposed, max(prices[op]["collective"].source for op in streams)))
    waited = run.ends[run.last] - run.busy[run.last] - exposed
    if waited > ROUNDING * run.ends[run.last]:
        spent["bubble"].append(Number(waited, max(number.source for numbers in spent.values() for number in numbers)))
    return {part: total(numbers) for part, numbers in spent.items()}


def stream_of(op: Op, machine: Machine) -> str | None:
    """The stream of an instruction beside which the worker computes; None for one that it waits for."""
    return machine.stream(str(op.attrs["axis"])) if machine.overlaps and op.name in COMMUNICATING else None


def op_seconds(
    op: Op, mesh: Mesh, functions: Mapping[str, Function], machine: Machine, seconds: FunctionSeconds
) -> dict[str, Number]:
    spent = {"overhead": machine.call_overhead}
    if op.name == "call":
        spent.update(seconds(functions[op.callee], mesh))
    elif op.name == SEND:
        spent["send"] = _sent(op, mesh, machine)
    elif is_ring(op):
        spent.update(_ring(op, mesh, machine))
    elif declaration_of(op).memory_passes:
        spent["move"] = _moved(op, mesh, machine)
    else:
        spent["collective"] = _collective(op, mesh, machine)
    return spent


def _sent(op: Op, mesh: Mesh, machine: Machine) -> Number:
    """Both halves of a send. Where no link is known for it, each side reads and writes every byte once."""
    nbytes = op.results[0].type.local_nbytes(mesh)
    if machine.levels or "send" in machine.links:
        return machine.message(nbytes, are_inside("pp", ends_of(op), mesh))
    copied = machine.seconds_to_move(4 * nbytes)
    link = machine.links.get("all_gather")
    return copied if link is None else total([copied, link.latency])


def _ring(op: Op, mesh: Mesh, machine: Machine) -> dict[str, Number]:
    """Seconds of ring attention, turn by turn. The longest message of each turn counts."""
    added = machine.seconds_to_move(merged_bytes(op, mesh, ranks_of(op, mesh)))
    group = group_along(str(op.attrs["axis"]), mesh)
    return {
        "overhead": machine.call_overhead.times(ranks_of(op, mesh)),
        "heavy": total([*(_kernel(turn, machine) for turn in turns(op, mesh)), added]),
        "collective": total(machine.message(nbytes, group.is_inside) for nbytes in handed_on_in(op, mesh)),
    }


def _moved(op: Op, mesh: Mesh, machine: Machine) -> Number:
    passes = declaration_of(op).memory_passes if any(op.inputs()) else 1
    return machine.seconds_to_move(passes * op.results[0].type.local_nbytes(mesh))


def _collective(op: Op, mesh: Mesh, machine: Machine) -> Number:
    axis = op.attrs["axis"]
    assert isinstance(axis, str)
    size = larger_side(next(op.inputs()).type, op.results[0].type, mesh)
    return machine.collective(op.name.removeprefix("moai."), size, group_along(axis, mesh))


def _function(fused: Fused, machine: Machine) -> dict[str, Number]:
    """Seconds of one call, by generated kernels where they are known and no faster than `fusion` predicts."""
    expected = _kernels(
        len(fused.kernels),
        [_kernel(kernel, machine) for kernel in fused.kernels if kernel.heavy is not None],
        [_kernel(kernel, machine) for kernel in fused.kernels if kernel.heavy is None],
        machine,
    )
    made = machine.made.get(key_of(fused.function)) if machine.made else None
    if made is None:
        return expected
    known = _kernels(
        sum(kernel.calls for kernel in made),
        [_made(kernel, machine) for kernel in made if kernel.heavy is not None],
        [_made(kernel, machine) for kernel in made if kernel.heavy is None],
        machine,
    )
    # Otherwise a plan could be predicted faster than its lower bound (`lower_bound`), which uses `fusion` alone.
    return max(expected, known, key=lambda spent: total(spent.values()).value)


def _kernels(calls: int, heavy: Sequence[Number], light: Sequence[Number], machine: Machine) -> dict[str, Number]:
    spent = {"heavy": total(heavy), "light": total(light)}
    if machine.launch.value:
        spent["launch"] = machine.launch.times(calls)
    return spent


def _made(kernel: MadeKernel, machine: Machine) -> Number:
    """Seconds of all calls."""
    rate = machine.rate("cheap", "f32") if kernel.heavy is None else machine.rate("mm", kernel.heavy)
    arithmetic, traffic = Number(kernel.flops / rate.value, rate.source), machine.seconds_to_move(kernel.nbytes)
    return _roofline(arithmetic, traffic, machine, is_heavy=kernel.heavy is not None).times(kernel.calls)


def _kernel(kernel: FusedKernel, machine: Machine) -> Number:
    """Seconds of one kernel, as measured if its heavy op was."""
    if kernel.heavy is not None and machine.kernels is not None:
        measured = machine.kernels.get(kernel_text(kernel.heavy))
        if measured is not None:
            return measured
    return rated(kernel, machine)


def rated(kernel: FusedKernel, machine: Machine) -> Number:
    """Seconds of one kernel by the machine's rates."""
    arithmetic = total(_arithmetic(op, machine) for op in kernel.ops)
    return _roofline(arithmetic, machine.seconds_to_move(kernel.nbytes), machine, is_heavy=kernel.heavy is not None)


def _roofline(arithmetic: Number, traffic: Number, machine: Machine, *, is_heavy: bool) -> Number:
    """Seconds of a kernel: the longer of arithmetic and traffic, or both together."""
    if is_heavy and machine.adds_traffic:
        return total([arithmetic, traffic])
    return max(arithmetic, traffic, key=lambda number: number.value)


def _arithmetic(op: Op, machine: Machine) -> Number:
    flops = flops_of(op)
    if not flops:
        return ZERO
    rate = machine.rate(declaration_of(op).cost, next(op.inputs(), op.results[0]).type.dtype)
    if is_causal(op):
        flops *= machine.causal_share(query_key_value(op)[1].type.shape[2])
    return Number(flops / rate.value, rate.source)


def optimizer_seconds(plan: Plan, machines: Sequence[Machine]) -> Number:
    """Seconds of the assumed optimizer, with the all-gathers of updates where parameters are replicated.

    `machines` describe the workers along `pp`.
    """
    mesh = plan.programs.joint.mesh
    pairs = zip(owner_coordinates(mesh), machines, strict=True)
    spent = [_optimizer_at(plan, coords, mesh, machine) for coords, machine in pairs]
    return max(spent, key=lambda number: number.value)


def _optimizer_at(plan: Plan, coords: dict[str, int], mesh: Mesh, machine: Machine) -> Number:
    spent: list[Number] = []
    for pair in trainables(plan):
        if not pair.gradient.layout.holds(coords):
            continue
        elements = prod(pair.gradient.local_shape(mesh))
        width = DTYPE_BYTES[pair.parameter.dtype]
        moved = elements * width * (optimizer.VALUE_PASSES + optimizer.STATE_PASSES)
        spent.append(machine.seconds_to_move(moved))
        spent += [
            machine.collective("all_gather", pair.parameter.local_nbytes(mesh), group_along(axis, mesh))
            for axis, _ in mesh.axes
            if pair.gradient.layout.split_of(axis) is not None and pair.parameter.layout.split_of(axis) is None
        ]
    seconds = total(spent)
    return Number(seconds.value, MeasureSource.ASSUMED) if spent else ZERO
