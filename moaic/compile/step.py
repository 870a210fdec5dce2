"""One captured step: planned once, then run lazily, as one joint program if possible.

A compiled forward returns handles and runs nothing. When `backward()` comes before anyone reads a value, forward and
backward run as one program; when a value is read first, the forward runs alone and keeps what the backward needs.
Outputs whose handles are gone when the backward comes are not computed; unset tangents are known zeros of the program.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Final, Protocol

from moaic.compile.memory_watch import MemoryUse, MemoryWatch
from moaic.compile.planning import OpenSizesError, TriedPlan, fits_op_by_op
from moaic.compile.step_clock import StepClock
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Function, Module
from moaic.ir.layout import Layout
from moaic.ir.printer import render
from moaic.ir.specialize import Specializer, require_whole, symbols_of
from moaic.ir.symbols import Symbols
from moaic.ir.types import TensorType
from moaic.ir.verify import check_made
from moaic.passes.lowering.plan import Plan
from moaic.passes.lowering.programs import Programs, lower, usually_unread
from moaic.passes.sharding.from_inputs import partition_as_inputs
from moaic.passes.transforms.symbolic_zeros import drop_zeros
from moaic.planner import log
from moaic.runtime.controller.accelerator import Accelerator
from moaic.runtime.controller.buffer import Buffer, row_major
from moaic.runtime.controller.deferred_forward import DeferredForward
from moaic.runtime.host.env_flags import CompileMode, GraphMode
from moaic.runtime.protocol.placement import Placement
from moaic.runtime.protocol.shortage import Shortage

HALVES: Final = ("forward", "backward")

SIZES_KEPT: Final = 64
"""Latest sizes of a step with open sizes whose types are kept."""

Key = tuple[int, int]
"""Two 64-bit words that seed the random ops of one call."""

Planner = Callable[[Module], Plan]
"""Returns the plan of a step. Variants of one step, which differ in known zeros, get the same configuration."""


class Alternatives(Protocol):
    """The plans after one that ran out of memory."""

    def move_on(self, tried: TriedPlan, shortage: Shortage, forgive: Callable[[], bool]) -> bool:
        """Whether another plan takes the place of one under which a worker ran out of memory; steps then forget that.

        `forgive` says whether the run may be sent again; it is called once there is another plan.
        """
        ...

    def fitted(self) -> None:
        """Takes note of a run that was waited for and has fitted."""
        ...


@dataclass(eq=False, slots=True)
class Variant:
    """The lowered step without known zeros and unread outputs, and the numbers of its loaded programs."""

    programs: Programs
    accelerator: Accelerator
    compiling: CompileMode
    graphs: GraphMode
    _numbers: dict[str, int] = field(default_factory=dict[str, int])
    fits_op_by_op: Callable[[tuple[int, ...]], bool] = lambda sizes: True
    """Whether a call of these sizes is predicted to fit in memory without fused kernels."""
    planned: tuple[Module, Plan] | None = None
    """The step and its plan; None for one that runs in the layouts of its operands."""
    watches: dict[str, MemoryWatch] = field(default_factory=dict[str, MemoryWatch])
    """By program the runs that have fitted."""

    def run(self, name: str, inputs: Sequence[Buffer], outputs: Sequence[Buffer | None], call: StepCall) -> int:
        """Runs a program for `call`; parameters are resharded to the layouts of a training program and stay there.

        Returns the number of the run's command.
        """
        has_key = any(role.kind == "key" for role in self.program(name).main.param_roles)
        promise = call.promise if call.promise is not None and not call.promise.done else None
        return self.accelerator.run(
            self.load(name),
            inputs,
            outputs,
            call.key if has_key else None,
            sizes=call.sizes,
            op_by_op=call.op_by_op,
            rest=call.resting,
            fulfils=promise,
        )

    def load(self, name: str) -> int:
        """The number of a program; sends it to the workers on its first use."""
        if name not in self._numbers:
            program = self._checked(name)
            require_whole(program)
            text = render(program)
            self._numbers[name] = self.accelerator.load(
                text,
                compiled=self.compiling is not CompileMode.NEVER,
                graphs=self.graphs,
                background=self.compiling is CompileMode.BACKGROUND,
                module=program,
            )
        return self._numbers[name]

    def is_compiled(self, names: Sequence[str], sizes: tuple[int, ...]) -> bool:
        """Whether these programs, which belong together, run compiled in a call of these sizes; loads them."""
        numbers = [self.load(name) for name in names if name != "backward" or self.programs.backward is not None]
        if self.accelerator.are_compiled(numbers):
            return True
        return not self.fits_op_by_op(sizes) and self.accelerator.are_compiled(numbers, at_once=True)

    def _checked(self, name: str) -> Module:
        """A program that is well formed; raises OpenSizesError for one that is not for open sizes."""
        program = self.program(name)
        try:
            return check_made(program, "lower")
        except RuntimeError as error:
            if symbols_of(program) is None:
                raise
            raise OpenSizesError from error

    def program(self, name: str) -> Module:
        program = {"joint": self.programs.joint, "forward": self.programs.forward, "backward": self.programs.backward}[
            name
        ]
        assert program is not None
        return program

    def result_types(self, name: str, start: int = 0) -> list[TensorType]:
        """The types of a program's results from index `start` on."""
        return [value.type for value in self.program(name).main.results[start:]]


@dataclass(eq=False, slots=True, weakref_slot=True)
class StepCall:
    """One call of the compiled forward. Autograd owns it: it lives until no backward of it can come.

    A deferred forward keeps its call until it has run. The accelerator, to which it is a reader of inputs, does not.
    """

    inputs: list[Buffer]
    """One buffer per parameter of the step, tangents and key left out."""
    outputs: list[weakref.ref[Buffer]]
    resting: frozenset[Buffer]
    """The inputs that are parameters or buffers of a model in training."""
    key: Key
    sizes: tuple[int, ...] = ()
    """The numbers of the step's symbols."""
    op_by_op: bool = False
    """Whether it runs op by op: its backward then computes values again with the bits of its forward."""
    promise: DeferredForward | None = None
    variant: Variant | None = None
    saved: list[Buffer] | None = None
    """Values saved for the backward, if the forward ran alone."""

    def reads(self, buffer: Buffer) -> bool:
        return any(each is buffer for each in self.inputs)

    def replace(self, buffer: Buffer, copy: Buffer) -> None:
        """Makes the call read `copy` instead of `buffer` (copy-on-write)."""
        self.inputs = [copy if each is buffer else each for each in self.inputs]

    def alive(self, position: int) -> Buffer | None:
        return self.outputs[position]()


@dataclass(frozen=True, slots=True)
class Try:
    """A run of a program of a variant, which may have failed for want of memory."""

    variant: Variant
    program: str
    run: int


class Step:
    """A step function and the programs that its calls have used so far. Safe to call from several threads."""

    def __init__(
        self,
        function: Function,
        accelerator: Accelerator,
        plan: Planner,
        *,
        compiling: CompileMode = CompileMode.BEFOREHAND,
        graphs: GraphMode = GraphMode.NEVER,
        symbols: Symbols | None = None,
        elsewhere: Callable[[tuple[int, ...]], Step] | None = None,
        clock: StepClock | None = None,
        alternatives: Alternatives | None = None,
    ) -> None:
        """`symbols` are those of open sizes; `elsewhere` returns another step, for sizes that they do not hold for.

        `clock` times the runs of the joint program. Without `alternatives` a plan that runs out of memory is an error.
        """
        self.module = Module((function,))
        self.function = function
        self.accelerator = accelerator
        self.compiling = compiling
        self.graphs = graphs
        self._plan = plan
        self._symbols = symbols or Symbols()
        self._elsewhere = elsewhere
        self._clock = clock
        self._alternatives = alternatives
        self._at = lru_cache(SIZES_KEPT)(self._specializer)
        self._plans: dict[frozenset[int], tuple[Module, Plan]] = {}
        self._variants: dict[tuple[frozenset[int], frozenset[int] | None], Variant] = {}
        roles = [function.param_role(i).kind for i in range(len(function.params))]
        self.tangents = [i for i, kind in enumerate(roles) if kind == "tangent"]
        self.given = [i for i, kind in enumerate(roles) if kind not in ("tangent", "key")]
        kinds = [function.result_role(i).kind for i in range(len(function.results))]
        self.outputs = list(function.outputs)
        self.grads = list(function.gradients)
        self._updates = "update" in kinds
        self._resting_variants: dict[tuple[int, ...], Variant | None] = {}
        self._assumed_zero = self._tangents_beside_a_loss()

    def _specializer(self, sizes: tuple[int, ...]) -> Specializer:
        return Specializer(self._symbols.numbers(sizes))

    def _tangents_beside_a_loss(self) -> frozenset[int]:
        """Tangents that are usually unset: where a scalar has a tangent (the loss), all of other shapes."""
        shapes = {i: self.function.params[i].type.shape for i in self.tangents}
        if () not in shapes.values():
            return frozenset()
        return frozenset(i for i, shape in shapes.items() if shape != ())

    def forward(self, inputs: list[Buffer], key: Key, sizes: tuple[int, ...] = ()) -> tuple[list[Buffer], StepCall]:
        """Output buffers and the call. A training step is deferred, an inference step is sent to the workers.

        `sizes` are the numbers of the symbols.
        """
        with self.accelerator.together():
            outputs = [self._new_buffer(self.function.results[i].type, sizes) for i in self.outputs]
            call = StepCall(inputs, [weakref.ref(buffer) for buffer in outputs], self._resting(inputs), key, sizes)
            if self.grads:
                self._defer(call, outputs)
            else:
                self._until_it_fits(call, lambda: self._try_inference(call, outputs))
            return outputs, call

    def _defer(self, call: StepCall, outputs: Sequence[Buffer]) -> None:
        # A Diagnostic from planning is raised here, where the user's call is on the stack, not when a value is read.
        self._check_planned(call.sizes)
        call.promise = DeferredForward(lambda: self._run_forward(call, self._assumed_zero), call.inputs, outputs)
        self.accelerator.promise(call.promise)
        self.accelerator.keep(call)

    def _until_it_fits(self, call: StepCall, attempt: Callable[[], Try]) -> None:
        """Runs a program, and again under another plan for as long as workers run out of memory in it.

        A run changes none of its operands and the key is that of the call, so nothing tells a later run from a first.
        Where there is no other plan, reading a result raises the error.
        """
        while self._ran_short(call, attempt()):
            pass

    def _ran_short(self, call: StepCall, tried: Try) -> bool:
        """Whether a worker ran out of memory in a run that another is to replace."""
        variant = tried.variant
        if self._alternatives is None or variant.planned is None:
            return False
        use = MemoryUse(call.op_by_op, call.sizes, self.accelerator.living)
        watch = variant.watches.setdefault(tried.program, MemoryWatch())
        if not watch.is_due(use):
            return False
        shortage = self.accelerator.shortage_in(tried.run)
        if shortage is None:
            watch.fitted(use)
            self._alternatives.fitted()
            return False
        forgive = partial(self.accelerator.forgive, tried.run)
        if call.op_by_op and variant.fits_op_by_op(call.sizes):
            # Compiled functions, for which memory is predicted, need less.
            variant.fits_op_by_op = _does_not_fit
            if is_forgiven := forgive():
                log.not_op_by_op(str(shortage))
            return is_forgiven
        step, plan = variant.planned
        symbols = symbols_of(step)
        numbers = {} if symbols is None else symbols.numbers(call.sizes)
        return self._alternatives.move_on(TriedPlan(step, plan, numbers, tried.program != "joint"), shortage, forgive)

    def forget_plans(self) -> None:
        """Have later calls planned anew."""
        self._plans.clear()
        self._variants.clear()

    def _try_inference(self, call: StepCall, outputs: Sequence[Buffer]) -> Try:
        variant = self._at_rest(call.inputs) or self._right_variant(call, frozenset(), ("forward",))
        call.op_by_op = not variant.is_compiled(("forward",), call.sizes)
        inputs = self._arguments(call, {}, variant.programs.forward_params)
        return Try(variant, "forward", variant.run("forward", inputs, outputs, call))

    def _new_buffer(self, type_: TensorType, sizes: tuple[int, ...]) -> Buffer:
        shape = self._at(sizes).type(type_).shape if sizes else type_.shape
        return self.accelerator.buffer(type_.dtype, shape, row_major(shape))

    def _at_rest(self, inputs: Sequence[Buffer]) -> Variant | None:
        """The variant that runs an overwriting step in the layouts of its operands; None for any other step."""
        if not self._updates or self._symbols.example:
            return None
        for buffer in inputs:
            if buffer.promise is not None:
                buffer.promise.force()
        places = tuple(buffer.place for buffer in inputs)
        key = tuple(map(id, places))
        if key not in self._resting_variants:
            self._resting_variants[key] = self._made_at_rest(places)
        return self._resting_variants[key]

    def _made_at_rest(self, places: Sequence[Placement | None]) -> Variant | None:
        spread = [place for place in places if place is not None and place.mesh.ranks > 1]
        meshes = {place.mesh for place in spread if place.layout.splits} or {place.mesh for place in spread[:1]}
        if len(meshes) != 1 or any(place and (place.layout.owner or place.layout.partial) for place in places):
            return None
        layouts: list[Layout | None] = [None] * len(self.function.params)
        for index, place in zip(self.given, places, strict=True):
            layouts[index] = None if place is None else place.layout
        try:
            module = partition_as_inputs(self.module, next(iter(meshes)), layouts)
        except Diagnostic:
            return None
        return Variant(lower(module), self.accelerator, self.compiling, self.graphs)

    def _resting(self, inputs: Sequence[Buffer]) -> frozenset[Buffer]:
        if not self.grads:
            return frozenset()
        pairs = zip(self.given, inputs, strict=True)
        return frozenset(buffer for i, buffer in pairs if self.function.param_role(i).kind in ("param", "buffer"))

    def backward(self, call: StepCall, tangents: Sequence[Buffer | None]) -> list[Buffer]:
        """Buffers for the gradients, in the order of the step's grad results; None stands for an unset tangent."""
        if not self.grads:
            return []
        given = dict(zip(self.tangents, tangents, strict=True))
        promise = call.promise
        assert promise is not None
        with self.accelerator.together():
            zeros = frozenset(i for i, buffer in given.items() if buffer is None or _is_zero(buffer))
            if any(buffer is not None and buffer.promise is promise for buffer in given.values()):
                promise.force()
            grads = list[Buffer]()
            attempt = self._try_halves if promise.done else self._try_joint
            self._until_it_fits(call, lambda: attempt(call, zeros, given, grads))
            promise.fulfilled()
        return grads

    def _try_halves(
        self, call: StepCall, zeros: frozenset[int], tangents: dict[int, Buffer | None], grads: list[Buffer]
    ) -> Try:
        """Run the backward alone, after the forward if that did not run under the same variant; sets `grads`."""
        if call.saved is None or call.variant is not self._right_variant(call, zeros, HALVES):
            if not zeros >= self._assumed_zero:
                self._assumed_zero = zeros
            self._run_forward(call, zeros)
        return self._try_backward(call, tangents, grads)

    def _try_joint(
        self, call: StepCall, zeros: frozenset[int], tangents: dict[int, Buffer | None], grads: list[Buffer]
    ) -> Try:
        """Run forward and backward as one program; sets `grads`."""
        handles = {position: call.alive(i) for i, position in enumerate(self.outputs)}
        results = {position: buffer for position, buffer in handles.items() if buffer is not None}
        variant = self._right_variant(call, zeros, ("joint",), frozenset(handles.keys() - results.keys()))
        grads[:] = self._new_gradients(call)
        results.update(zip(self.grads, grads, strict=True))
        made = [results[i] for i in sorted(results)]
        call.op_by_op = not variant.is_compiled(("joint",), call.sizes)
        self._count(call, variant, ("joint",))
        inputs = self._arguments(call, tangents, variant.programs.joint_params)
        return Try(variant, "joint", variant.run("joint", inputs, made, call))

    def _new_gradients(self, call: StepCall) -> list[Buffer]:
        return [self._new_buffer(self.function.results[i].type, call.sizes) for i in self.grads]

    def _run_forward(self, call: StepCall, zeros: frozenset[int]) -> None:
        """Run the forward alone."""
        self._until_it_fits(call, lambda: self._try_forward(call, zeros))

    def _try_forward(self, call: StepCall, zeros: frozenset[int]) -> Try:
        """Run the forward without outputs that exist already or that have no handle any more."""
        call.variant = self._right_variant(call, zeros, HALVES)
        call.op_by_op = not call.variant.is_compiled(HALVES, call.sizes)
        self._count(call, call.variant, HALVES)
        done = call.promise is not None and call.promise.done
        outputs = [None if done else call.alive(i) for i in range(len(self.outputs))]
        saved = call.variant.result_types("forward", len(outputs))
        call.saved = [self._new_buffer(type_, call.sizes) for type_ in saved]
        inputs = self._arguments(call, {}, call.variant.programs.forward_params)
        return Try(call.variant, "forward", call.variant.run("forward", inputs, [*outputs, *call.saved], call))

    def _count(self, call: StepCall, variant: Variant, names: Sequence[str]) -> None:
        """Tells the clock of a run of these programs, if it is compiled."""
        if self._clock is not None and not call.op_by_op:
            present = [name for name in names if name != "backward" or variant.programs.backward is not None]
            self._clock.about_to_run(self.accelerator, [variant.load(name) for name in present])

    def _try_backward(self, call: StepCall, tangents: dict[int, Buffer | None], grads: list[Buffer]) -> Try:
        assert call.variant is not None
        assert call.saved is not None
        inputs = self._arguments(call, tangents, call.variant.programs.backward_params)
        grads[:] = self._new_gradients(call)
        return Try(call.variant, "backward", call.variant.run("backward", [*call.saved, *inputs], grads, call))

    def _arguments(self, call: StepCall, tangents: dict[int, Buffer | None], positions: Sequence[int]) -> list[Buffer]:
        """Buffers for the step's parameters at `positions`, the key left out."""
        given = dict[int, Buffer | None](zip(self.given, call.inputs, strict=True)) | tangents
        return [self._tangent(call, i, given[i]) for i in positions if i in given]

    def _tangent(self, call: StepCall, position: int, buffer: Buffer | None) -> Buffer:
        """The buffer itself, or a new one of zeros for an unset tangent."""
        if buffer is not None:
            return buffer
        zero = self._new_buffer(self.function.params[position].type, call.sizes)
        self.accelerator.fill(zero, 0)
        return zero

    def _right_variant(
        self, call: StepCall, zeros: frozenset[int], names: Sequence[str], unread: frozenset[int] | None = None
    ) -> Variant:
        """The variant of which the programs `names` are right for the sizes of `call`; that of another step if need be.

        Lowering and loading may add conditions to the symbols, so both come first.
        """
        if self._elsewhere is None or not call.sizes:
            return self._variant(zeros, unread)
        try:
            variant = self._variant(zeros, unread)
            for name in names:
                variant.load(name)
            if self._symbols.hold(call.sizes):
                return variant
        except OpenSizesError:
            self._symbols.is_given_up = True
        return self._elsewhere(call.sizes)._right_variant(call, zeros, names, unread)

    def _check_planned(self, sizes: tuple[int, ...]) -> None:
        """Plan the variant that is probably needed, here or in the step for these sizes."""
        try:
            self._planned(self._assumed_zero)
        except OpenSizesError:
            self._symbols.is_given_up = True
            if self._elsewhere is not None:
                self._elsewhere(sizes)._check_planned(sizes)

    def _variant(self, zeros: frozenset[int], unread: frozenset[int] | None = None) -> Variant:
        """The variant whose joint program omits the outputs at `unread`; None omits those of the plan."""
        if (zeros, unread) not in self._variants:
            self._variants[zeros, unread] = self._new_variant(zeros, unread)
        return self._variants[zeros, unread]

    def _new_variant(self, zeros: frozenset[int], unread: frozenset[int] | None) -> Variant:
        step, plan = self._planned(zeros)
        if unread == usually_unread(plan.module.main):
            return self._variant(zeros)
        programs = plan.programs if unread is None else lower(plan.module, unread)

        @lru_cache(SIZES_KEPT)
        def fits(sizes: tuple[int, ...]) -> bool:
            return fits_op_by_op(plan, self._symbols, sizes)

        waits = self.compiling is CompileMode.BACKGROUND and not fits(())
        compiling = CompileMode.BEFOREHAND if waits else self.compiling
        return Variant(programs, self.accelerator, compiling, self.graphs, fits_op_by_op=fits, planned=(step, plan))

    def _planned(self, zeros: frozenset[int]) -> tuple[Module, Plan]:
        """The step without known zeros, and its plan."""
        if zeros not in self._plans:
            step = drop_zeros(self.module, zeros)
            self._plans[zeros] = step, self._plan(step)
        return self._plans[zeros]


def _does_not_fit(sizes: tuple[int, ...]) -> bool:
    return False


def _is_zero(buffer: Buffer) -> bool:
    return buffer.place is None and buffer.host is None and buffer.promise is None and buffer.fill == 0
