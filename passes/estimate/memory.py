"""Peak bytes of one worker: liveness analysis of its programs.

In a pipeline the worker with the highest peak counts. Parameters and results of a program are live until its end,
every other value until its last reader. A call adds the peak of its function (`fusion`: outputs of kernels, no
workspace of matmuls, no reuse of an input that dies). Sums are updated in place. Fragmentation and the process itself
are not counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from moaic.ir.graph import Function, Module, Op, Value
from moaic.ir.layout import Mesh
from moaic.ir.localize import localize
from moaic.ir.op_names import REDUCE_SCATTER, SEND
from moaic.ir.ops import declaration_of
from moaic.ir.ring_attention import is_ring
from moaic.ir.types import DTYPE_BYTES, TensorType
from moaic.passes.estimate.per_rank import held, of_rank, owner_coordinates
from moaic.passes.lowering.plan import Plan
from moaic.passes.lowering.programs import Programs, lower
from moaic.passes.perf import optimizer
from moaic.passes.perf.fusion import Fused, fuse
from moaic.passes.perf.ring_attention import transient


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the fullest worker: that with the highest peak over a whole step, as a share of what it may use."""

    parameters: int
    """Persistent parameters and buffers."""
    gradients: int
    optimizer: int
    """Optimizer state, assumed."""
    joint: int
    """Peak of the joint program, persistent values included, outputs beside a loss left out."""
    limit: int = 0
    """Bytes that this worker may use, where it is predicted for a machine."""

    @property
    def step(self) -> int:
        """Peak while the optimizer runs, which is assumed to need one temporary value per gradient element."""
        return self.parameters + 2 * self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        return max(self.joint, self.step)


FusedFunctions = Callable[[Function, Mesh], Fused]


def fused_functions() -> FusedFunctions:
    """`fuse` of the localized function, cached: programs of a plan share functions."""
    return localized_functions(fuse)


def localized_functions(kernels: Callable[[Function], Fused]) -> FusedFunctions:
    """`kernels` of the localized function, cached."""
    known: dict[Function, Fused] = {}

    def localized(function: Function, mesh: Mesh) -> Fused:
        if function not in known:
            known[function] = kernels(localize(function, mesh))
        return known[function]

    return localized


def memory_of(plan: Plan, fused: FusedFunctions) -> Memory:
    """Memory of the plan on the worker with the highest peak."""
    return max(
        (_memory_at(plan, coords, fused) for coords in owner_coordinates(plan.programs.joint.mesh)),
        key=lambda memory: memory.peak,
    )


def _memory_at(plan: Plan, coords: dict[str, int], fused: FusedFunctions) -> Memory:
    persistent = Persistent.of(plan, coords)
    joint = _joint_at(plan.programs, persistent, coords, fused)
    gradients = sum(each.gradient.local_nbytes(persistent.mesh) for each in persistent.trained)
    return Memory(bytes_of(persistent.values.values(), persistent.mesh), gradients, persistent.state, joint)


def _joint_at(programs: Programs, persistent: Persistent, coords: dict[str, int], fused: FusedFunctions) -> int:
    return persistent.beside(programs.joint_params) + program_peak(programs.joint, fused, coords)


def held_peak(plan: Plan, fused: FusedFunctions) -> int:
    """Peak bytes of the joint program where the user holds every output until its end."""
    programs = lower(plan.module, ())
    return max(
        _joint_at(programs, Persistent.of(plan, coords), coords, fused)
        for coords in owner_coordinates(programs.joint.mesh)
    )


def split_peak(plan: Plan, fused: FusedFunctions) -> int:
    """Peak bytes where forward and backward run apart: the values saved by all micro-batches are live in between."""
    return max(_split_peak_at(plan, coords, fused) for coords in owner_coordinates(plan.programs.joint.mesh))


def _split_peak_at(plan: Plan, coords: dict[str, int], fused: FusedFunctions) -> int:
    programs, persistent = plan.programs, Persistent.of(plan, coords)
    first = persistent.beside(programs.forward_params) + program_peak(programs.forward, fused, coords)
    if programs.backward is None:
        return first
    main = programs.forward.main
    outputs = [value for i, value in enumerate(main.results) if main.result_role(i).kind != "saved"]
    beside = bytes_of(held(outputs, coords), persistent.mesh) + persistent.beside(programs.backward_params)
    return max(first, beside + program_peak(programs.backward, fused, coords))


@dataclass(frozen=True, slots=True)
class Persistent:
    """The values that the ranks at given coordinates hold between steps."""

    values: Mapping[int, Value]
    """Parameters and buffers, by position in the step."""
    trained: Sequence[Trainable]
    mesh: Mesh

    @classmethod
    def of(cls, plan: Plan, coords: dict[str, int]) -> Persistent:
        step = plan.on_workers
        values = {
            i: param
            for i, param in enumerate(step.params)
            if step.param_role(i).kind in ("param", "buffer") and param.type.layout.holds(coords)
        }
        trained = [each for each in trainables(plan) if each.gradient.layout.holds(coords)]
        return cls(values, trained, plan.programs.joint.mesh)

    @property
    def state(self) -> int:
        """Bytes of optimizer state."""
        return sum(each.state_bytes(self.mesh) for each in self.trained)

    def beside(self, positions: Sequence[int]) -> int:
        """Persistent bytes besides the parameters at these positions, which a program counts itself."""
        return self.state + bytes_of((value for i, value in self.values.items() if i not in positions), self.mesh)


@dataclass(frozen=True, slots=True)
class Trainable:
    """Types of a parameter and its gradient under the plan. Optimizer state has the layout of the gradient."""

    parameter: TensorType
    gradient: TensorType

    def state_bytes(self, mesh: Mesh) -> int:
        """Bytes of optimizer state on one rank."""
        return optimizer.STATES * prod(self.gradient.local_shape(mesh)) * DTYPE_BYTES[self.parameter.dtype]


def trainables(plan: Plan) -> list[Trainable]:
    """Every parameter whose gradient the step computes."""
    main = plan.on_workers
    roles = [(main.param_role(i), param.type) for i, param in enumerate(main.params)]
    params = {role.label: type_ for role, type_ in roles if role.kind == "param"}
    results = ((main.result_role(i), value.type) for i, value in enumerate(main.results))
    grads = ((role.label, type_) for role, type_ in results if role.kind == "grad")
    return [Trainable(params[label], type_) for label, type_ in grads if label in params]


def bytes_of(values: Iterable[Value], mesh: Mesh) -> int:
    """Bytes of the values on one rank, each counted once."""
    return sum(value.type.local_nbytes(mesh) for value in set(values))


@dataclass(frozen=True, slots=True)
class Change:
    """What one instruction does to the memory of its worker, in bytes."""

    made: int
    most: int
    """The largest need while it runs, beyond what was live before."""
    dying: Sequence[Value]
    """Values that no later instruction uses, which own their memory."""


def changes(main: Function, program: Module, fused: FusedFunctions) -> list[Change]:
    """The change by every instruction of `main`, one worker's part of the program's main function."""
    mesh = program.mesh
    functions = {function.name: function for function in program.functions}
    owners = _owners(main, lambda op: fused(functions[op.callee], mesh))
    last = _last_uses(main, owners)
    dying: dict[int, list[Value]] = defaultdict(list)
    for owner, index in last.items():
        dying[index].append(owner)
    found: list[Change] = []
    for index, op in enumerate(main.ops):
        made = bytes_of((result for result in op.results if owners[result] is result), mesh)
        inside = fused(functions[op.callee], mesh).transient if op.name == "call" else 0
        if is_ring(op):
            inside = transient(op, mesh)
        elif op.name == REDUCE_SCATTER:
            inside = made + _padded_copy(op, mesh)
        found.append(Change(made, max(made, inside), dying[index]))
    return found


def _padded_copy(op: Op, mesh: Mesh) -> int:
    """Bytes of the copy that a reduce-scatter into uneven shards sums; it has none for even ones."""
    (whole,), (part,) = tuple(op.inputs()), op.results
    padded = part.type.local_nbytes(mesh) * mesh.size(str(op.attrs["axis"]))
    return padded if padded > whole.type.local_nbytes(mesh) else 0


def program_peak(program: Module, fused: FusedFunctions, coords: dict[str, int] | None = None) -> int:
    """Peak bytes of a worker (in a pipeline the one at `coords`), parameters and results included."""
    main, mesh = of_rank(program.main, coords or {}), program.mesh
    live = peak = bytes_of(main.params, mesh)
    for change in changes(main, program, fused):
        peak = max(peak, live + change.most)
        live += change.made - sum(value.type.local_nbytes(mesh) for value in change.dying)
    return peak


def _owners(main: Function, callee: Callable[[Op], Fused]) -> dict[Value, Value]:
    """By value, the value that owns its memory."""
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
    """By owner that dies before the end, the last instruction that uses it."""
    last: dict[Value, int] = {}
    for index, op in enumerate(main.ops):
        last.update((owners[value], index) for value in (*op.inputs(), *op.results))
    for value in (*main.params, *main.results):
        last.pop(owners[value], None)
    return last
