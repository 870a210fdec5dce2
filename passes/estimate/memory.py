"""Peak bytes of one worker: liveness over the programs that it will run.

In a pipeline the fullest worker counts. What a program was given and what it returns is held until its end; everything
else dies with its last reader. A call holds what its function needs at the worst moment (`fusion`: kernels' outputs, no
workspace of matmuls, no reuse of an input that dies). A sum may be added to in place. The allocator's waste and the
process itself are not counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from moaic.ir.graph import Function, Module, Op, Value
from moaic.ir.layout import Mesh
from moaic.ir.localize import localize
from moaic.ir.op_names import SEND
from moaic.ir.ops import declaration_of
from moaic.ir.ring_attention import is_ring
from moaic.ir.types import DTYPE_BYTES, TensorType
from moaic.passes.estimate.per_rank import held, homes, of_rank
from moaic.passes.lowering.plan import Plan
from moaic.passes.lowering.programs import Programs, lower
from moaic.passes.perf import optimizer
from moaic.passes.perf.fusion import Fused, fuse
from moaic.passes.perf.ring_attention import transient


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the fullest worker, whole steps considered."""

    parameters: int
    """Parameters and buffers at rest."""
    gradients: int
    optimizer: int
    """Optimizer state, assumed."""
    joint: int
    """Peak while forward and backward run as one, everything at rest included, and without outputs beside a loss."""

    @property
    def step(self) -> int:
        """Peak while the optimizer runs; it is assumed to need one more value per gradient element for a while."""
        return self.parameters + 2 * self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        return max(self.joint, self.step)


FusedFunctions = Callable[[Function, Mesh], Fused]


def fused_functions() -> FusedFunctions:
    """`fuse` of the localized function, remembered: plans share functions between their programs."""
    known: dict[Function, Fused] = {}

    def fused(function: Function, mesh: Mesh) -> Fused:
        if function not in known:
            known[function] = fuse(localize(function, mesh))
        return known[function]

    return fused


def memory_of(plan: Plan, fused: FusedFunctions) -> Memory:
    """Bytes that the plan needs on the worker that needs most."""
    return max((_memory_at(plan, at, fused) for at in homes(plan.programs.joint.mesh)), key=lambda memory: memory.peak)


def _memory_at(plan: Plan, at: dict[str, int], fused: FusedFunctions) -> Memory:
    at_rest = _AtRest.of(plan, at)
    joint = _joint_at(plan.programs, at_rest, at, fused)
    gradients = sum(each.gradient.local_nbytes(at_rest.mesh) for each in at_rest.trained)
    return Memory(bytes_of(at_rest.values.values(), at_rest.mesh), gradients, at_rest.state, joint)


def _joint_at(programs: Programs, at_rest: _AtRest, at: dict[str, int], fused: FusedFunctions) -> int:
    return at_rest.beside(programs.joint_params) + program_peak(programs.joint, fused, at)


def held_peak(plan: Plan, fused: FusedFunctions) -> int:
    """Bytes needed where forward and backward run as one, and somebody holds every output by then."""
    programs = lower(plan.module, ())
    return max(_joint_at(programs, _AtRest.of(plan, at), at, fused) for at in homes(programs.joint.mesh))


def split_peak(plan: Plan, fused: FusedFunctions) -> int:
    """Bytes needed where forward and backward run apart: what the backward needs of every micro-batch is kept."""
    return max(_split_peak_at(plan, at, fused) for at in homes(plan.programs.joint.mesh))


def _split_peak_at(plan: Plan, at: dict[str, int], fused: FusedFunctions) -> int:
    programs, at_rest = plan.programs, _AtRest.of(plan, at)
    first = at_rest.beside(programs.forward_params) + program_peak(programs.forward, fused, at)
    if programs.backward is None:
        return first
    main = programs.forward.main
    outputs = [value for i, value in enumerate(main.results) if main.result_role(i).kind != "saved"]
    beside = bytes_of(held(outputs, at), at_rest.mesh) + at_rest.beside(programs.backward_params)
    return max(first, beside + program_peak(programs.backward, fused, at))


@dataclass(frozen=True, slots=True)
class _AtRest:
    """What the ranks at some place hold between steps."""

    values: Mapping[int, Value]
    """Parameters and buffers, by position in the step."""
    trained: Sequence[Trainable]
    mesh: Mesh

    @classmethod
    def of(cls, plan: Plan, at: dict[str, int]) -> _AtRest:
        step = plan.on_workers
        values = {
            i: param
            for i, param in enumerate(step.params)
            if step.param_role(i).kind in ("param", "buffer") and param.type.layout.holds(at)
        }
        trained = [each for each in trainables(plan) if each.gradient.layout.holds(at)]
        return cls(values, trained, plan.programs.joint.mesh)

    @property
    def state(self) -> int:
        """Bytes of the optimizer."""
        return sum(each.state_bytes(self.mesh) for each in self.trained)

    def beside(self, positions: Sequence[int]) -> int:
        """Bytes there while a program runs that has the parameters at these positions."""
        return self.state + bytes_of((value for i, value in self.values.items() if i not in positions), self.mesh)


@dataclass(frozen=True, slots=True)
class Trainable:
    """Types of a parameter at rest and of its gradient as the plan lays them. Optimizer state lies as the gradient."""

    parameter: TensorType
    gradient: TensorType

    def state_bytes(self, mesh: Mesh) -> int:
        """What one rank's optimizer keeps for it."""
        return optimizer.STATES * prod(self.gradient.local_shape(mesh)) * DTYPE_BYTES[self.parameter.dtype]


def trainables(plan: Plan) -> list[Trainable]:
    """Every parameter of which the step makes the gradient."""
    main = plan.on_workers
    roles = [(main.param_role(i), param.type) for i, param in enumerate(main.params)]
    params = {role.label: type_ for role, type_ in roles if role.kind == "param"}
    made = ((main.result_role(i), value.type) for i, value in enumerate(main.results))
    grads = ((role.label, type_) for role, type_ in made if role.kind == "grad")
    return [Trainable(params[label], type_) for label, type_ in grads if label in params]


def bytes_of(values: Iterable[Value], mesh: Mesh) -> int:
    """Bytes of the values on one rank, each counted once."""
    return sum(value.type.local_nbytes(mesh) for value in set(values))


def program_peak(program: Module, fused: FusedFunctions, at: dict[str, int] | None = None) -> int:
    """Most bytes that a worker (of a pipeline the one at `at`) holds at once, parameters and results included."""
    main, mesh = of_rank(program.main, at or {}), program.mesh
    functions = {function.name: function for function in program.functions}
    owners = _owners(main, lambda op: fused(functions[op.callee], mesh))
    last = _last_uses(main, owners)
    dying: dict[int, list[Value]] = defaultdict(list)
    for owner, index in last.items():
        dying[index].append(owner)
    live = peak = sum(owner.type.local_nbytes(mesh) for owner in set(main.params))
    for index, op in enumerate(main.ops):
        made = bytes_of((result for result in op.results if owners[result] is result), mesh)
        inside = fused(functions[op.callee], mesh).transient if op.name == "call" else 0
        if is_ring(op):
            inside = transient(op, mesh)
        peak = max(peak, live + max(made, inside))
        live += made - sum(owner.type.local_nbytes(mesh) for owner in dying[index])
    return peak


def _owners(main: Function, callee: Callable[[Op], Fused]) -> dict[Value, Value]:
    """For every value the one whose memory it is."""
    owners = {param: param for param in main.params}
    readers: dict[Value, int] = {}
    for index, op in enumerate(main.ops):
        readers.update(dict.fromkeys(op.inputs(), index))
    held = {*main.params, *main.results}
    for index, op in enumerate(main.ops):
        if op.name == "call":
            _call_owners(op, callee(op), owners)
            continue
        if op.name == SEND or is_ring(op):
            owners.update((result, result) for result in op.results)
            continue
        (result,) = op.results
        source = next(op.inputs(), None)
        if source is None:
            owners[result] = result
            continue
        free = readers[source] == index and source not in held and owners[source] not in held
        owners[result] = (
            owners[source] if declaration_of(op).in_place and free and _same_bytes(source, result) else result
        )
    return owners


def _same_bytes(source: Value, result: Value) -> bool:
    return source.type.dtype == result.type.dtype and source.type.shape == result.type.shape


def _call_owners(op: Op, callee: Fused, owners: dict[Value, Value]) -> None:
    """Results that are views of an operand, or of an earlier result, have no memory of their own."""
    outside = dict(zip(callee.function.params, op.inputs(), strict=False))
    first: dict[Value, Value] = {}
    for result, owner in zip(op.results, callee.results, strict=True):
        owners[result] = owners[outside[owner]] if owner in outside else first.setdefault(owner, result)


def _last_uses(main: Function, owners: Mapping[Value, Value]) -> dict[Value, int]:
    """For every owner that dies before the end, the instruction after which nobody needs it."""
    last: dict[Value, int] = {}
    for index, op in enumerate(main.ops):
        last.update((owners[value], index) for value in (*op.inputs(), *op.results))
    for value in (*main.params, *main.results):
        last.pop(owners[value], None)
    return last
