"""Lower a partitioned module to programs: calls of segments, and instructions over the mesh axes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from moaic.ir.backward_slice import backward_slice
from moaic.ir.graph import Function, Module, Op, Role, Value
from moaic.ir.ops import Kind, kind_of
from moaic.ir.specialize import specialized
from moaic.ir.symbols import Numbers
from moaic.ir.verify import check_made
from moaic.passes.loop_axes import MICRO_BATCHES, Phase, Unrolled
from moaic.passes.lowering.grad_accumulation import added_inside
from moaic.passes.lowering.segments import Segments, segment
from moaic.passes.lowering.unroll_loops import function_of_part, runs_per_part, unroll
from moaic.passes.transforms.outline import inlined_call


@dataclass(frozen=True, slots=True)
class Lower:
    name: ClassVar[str] = "lower"
    summary: ClassVar[str] = "lower to the joint program: segments, instructions, micro-batches unrolled"

    def apply(self, module: Module) -> Module:
        return lower(module, ()).joint


@dataclass(frozen=True, slots=True)
class Halves:
    """The step as two programs. The backward's parameters begin with the forward's trailing `saved` results."""

    forward: Module
    backward: Module | None
    forward_params: tuple[int, ...]
    backward_params: tuple[int, ...]
    """Positions in the step's parameters, without `saved`."""

    def at(self, numbers: Numbers) -> Halves:
        backward = None if self.backward is None else specialized(self.backward, numbers)
        return replace(self, forward=specialized(self.forward, numbers), backward=backward)


@dataclass(frozen=True)
class Programs:
    """The programs of one plan: the joint program of a step, and its halves for a user who reads the loss in between.

    `…_params` are the positions of the step's parameters that each program reads. The halves are made on first use: for
    most plans only the cost of the joint program is needed.
    """

    joint: Module
    joint_params: tuple[int, ...]
    make_halves: Callable[[], Halves]

    def at(self, numbers: Numbers) -> Programs:
        """The programs where the symbols of open sizes have these numbers."""
        return Programs(specialized(self.joint, numbers), self.joint_params, lambda: self._halves.at(numbers))

    @cached_property
    def _halves(self) -> Halves:
        return self.make_halves()

    @property
    def forward(self) -> Module:
        return self._halves.forward

    @property
    def backward(self) -> Module | None:
        return self._halves.backward

    @property
    def forward_params(self) -> tuple[int, ...]:
        return self._halves.forward_params

    @property
    def backward_params(self) -> tuple[int, ...]:
        return self._halves.backward_params


def check_programs(programs: Programs) -> None:
    """Raises RuntimeError, a bug of moaic, unless all programs of a plan are well formed."""
    for program in (programs.joint, programs.forward, programs.backward):
        if program is not None:
            check_made(program, "lower")


def lower(module: Module, unread: Collection[int] | None = None) -> Programs:
    """Programs for `module`; the joint one does not make the results at the positions `unread`.

    By default those are the results of `usually_unread`.
    """
    segments = Segments(frozenset(function.name for function in module.functions))
    unrolled = unroll(_inlined(module, segments))
    left_out = usually_unread(module.main) if unread is None else unread
    joint, joint_params = _selected(unrolled, [i for i in range(len(unrolled.function.results)) if i not in left_out])
    return Programs(_program(joint, segments), joint_params, lambda: _in_halves(unrolled, segments))


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The joint program with only some of its micro-batches, and the phase of each of its instructions."""

    joint: Module
    joint_params: tuple[int, ...]
    phases: tuple[Phase, ...]
    parts: int
    """Micro-batches that the program has."""


def excerpt(module: Module, parts: int) -> Excerpt:
    """The joint program of `lower` with at most so many micro-batches."""
    segments = Segments(frozenset(function.name for function in module.functions))
    unrolled = unroll(_inlined(module, segments), parts)
    left_out = usually_unread(module.main)
    selected, params = _selected(unrolled, [i for i in range(len(unrolled.function.results)) if i not in left_out])
    joint, phases = _phased_program(selected, segments)
    return Excerpt(joint, params, phases, min(parts, module.mesh.size(MICRO_BATCHES)))


def usually_unread(main: Function) -> frozenset[int]:
    """Positions of the outputs beside a loss that the user no longer holds when the backward runs.

    Of a training step these are all outputs but scalars and those whose tangent is read.
    """
    read = {value for op in main.ops for value in op.inputs()}
    tangents = [(main.param_role(i), param) for i, param in enumerate(main.params)]
    given = {role.label: param.type.shape for role, param in tangents if role.kind == "tangent" and param in read}
    if () not in given.values():
        return frozenset()
    outputs = ((i, main.result_role(i), main.results[i].type.shape) for i in main.outputs)
    return frozenset(i for i, role, shape in outputs if role.kind == "output" and shape and role.label not in given)


def _in_halves(unrolled: Unrolled, segments: Segments) -> Halves:
    outputs = unrolled.function.outputs
    if len(outputs) == len(unrolled.function.results):
        whole, params = _selected(unrolled, outputs)
        return Halves(_program(whole, segments), None, params, ())
    forward, backward, backward_params = _halves(unrolled, outputs)
    forward_params = _read_params(forward.function)
    forward = _with_params(forward, forward_params)
    return Halves(_program(forward, segments), _program(backward, segments), forward_params, backward_params)


def _read_params(function: Function) -> tuple[int, ...]:
    read = {*function.results, *(value for op in function.ops for value in op.inputs())}
    return tuple(i for i, param in enumerate(function.params) if param in read)


def _with_params(unrolled: Unrolled, positions: Sequence[int]) -> Unrolled:
    """The function with only the parameters at these positions."""
    function = unrolled.function
    params = tuple(function.params[i] for i in positions)
    roles = tuple(function.param_role(i) for i in positions)
    return Unrolled(replace(function, params=params, param_roles=roles), unrolled.mesh, unrolled.phases)


def _inlined(module: Module, segments: Segments) -> Module:
    """`module` with every callee that has instructions inlined as segments and instructions.

    The remaining callees are functions of one micro-batch.
    """
    bodies: dict[str, Function] = {}
    for function in module.functions[:-1]:
        if any(kind_of(op) is Kind.INSTRUCTION for op in function.ops):
            body = _expand(function, bodies)
            phases = [runs_per_part(op, MICRO_BATCHES) for op in body.ops]
            bodies[function.name] = segment(body, module.mesh, phases, segments).function
        else:
            segments.by_key[function.name] = function
    for key, function in segments.by_key.items():
        segments.by_key[key] = function_of_part(function, MICRO_BATCHES, module.mesh)
    return replace(module, functions=(*segments.functions, _expand(module.main, bodies)))


def _expand(function: Function, bodies: dict[str, Function]) -> Function:
    """`function` with calls of the functions in `bodies` replaced by their ops."""
    mapping: dict[Value, Value] = {}
    ops: list[Op] = []
    for original in function.ops:
        op = original.with_operands(mapping)
        body = bodies.get(op.callee) if op.name == "call" else None
        if body is None:
            ops.append(op)
            continue
        inlined, results = inlined_call(op, body)
        ops += inlined
        mapping.update(zip(original.results, results, strict=True))
    return replace(function, ops=tuple(ops), results=tuple(mapping.get(value, value) for value in function.results))


def _selected(unrolled: Unrolled, results: Sequence[int]) -> tuple[Unrolled, tuple[int, ...]]:
    """The step with only some of its results, and the positions of the parameters that it still reads."""
    step = unrolled.function
    kept = sorted(backward_slice(step, [step.results[i] for i in results]))
    function = replace(
        step,
        ops=tuple(step.ops[i] for i in kept),
        results=tuple(step.results[i] for i in results),
        result_roles=tuple(step.result_role(i) for i in results),
    )
    positions = _read_params(function)
    phases = tuple(unrolled.phases[i] for i in kept)
    return _with_params(Unrolled(function, unrolled.mesh, phases), positions), positions


def _halves(unrolled: Unrolled, outputs: Sequence[int]) -> tuple[Unrolled, Unrolled, tuple[int, ...]]:
    """The forward with its saved values as further results, and the backward that starts from them."""
    step = unrolled.function
    forward_ops = backward_slice(step, [step.results[i] for i in outputs])
    grads = [i for i in range(len(step.results)) if i not in set(outputs)]
    backward_ops = sorted(backward_slice(step, [step.results[i] for i in grads]) - forward_ops)
    made = {result for i in forward_ops for result in step.ops[i].results}
    read = [value for i in backward_ops for value in step.ops[i].inputs()] + [step.results[i] for i in grads]
    saved = list(dict.fromkeys(value for value in read if value in made))
    reads_param = set(read)
    positions = tuple(i for i, param in enumerate(step.params) if param in reads_param)
    forward = replace(
        step,
        name=f"{step.name}.forward",
        ops=tuple(op for i, op in enumerate(step.ops) if i in forward_ops),
        results=(*(step.results[i] for i in outputs), *saved),
        result_roles=(*(step.result_role(i) for i in outputs), *(Role("saved") for _ in saved)),
    )
    backward = replace(
        step,
        name=f"{step.name}.backward",
        params=(*saved, *(step.params[i] for i in positions)),
        param_roles=(*(Role("saved") for _ in saved), *(step.param_role(i) for i in positions)),
        ops=tuple(step.ops[i] for i in backward_ops),
        results=tuple(step.results[i] for i in grads),
        result_roles=tuple(step.result_role(i) for i in grads),
    )
    ordered = sorted(forward_ops)
    return (
        Unrolled(forward, unrolled.mesh, tuple(unrolled.phases[i] for i in ordered)),
        Unrolled(backward, unrolled.mesh, tuple(unrolled.phases[i] for i in backward_ops)),
        positions,
    )


def _program(unrolled: Unrolled, segments: Segments) -> Module:
    """One program with the segments that it calls, accumulation over micro-batches fused into them."""
    return _phased_program(unrolled, segments)[0]


def _phased_program(unrolled: Unrolled, segments: Segments) -> tuple[Module, tuple[Phase, ...]]:
    segmented = segment(unrolled.function, unrolled.mesh, unrolled.phases, segments)
    main = segmented.function
    called = {op.callee for op in main.ops if op.name == "call"}
    functions = tuple(function for function in segments.functions if function.name in called)
    merged = added_inside(Module((*functions, main), unrolled.mesh), segments.accumulating)
    return merged.program, tuple(segmented.phases[i] for i in merged.origins)
