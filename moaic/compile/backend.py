"""The Dynamo backend `moai`: each captured graph becomes steps on the virtual accelerator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import SkipFrame

from moaic.capture.aot import capture_backend
from moaic.capture.autocast import takes_precision
from moaic.capture.before_autograd import assignment_of_data
from moaic.capture.compile_hooks import checks_options
from moaic.capture.dynamo_patches import captures_whole
from moaic.capture.float8 import in_float8
from moaic.capture.fx.captured import Captured, Instance
from moaic.capture.fx.program import FxProgram
from moaic.capture.pieces import piece_of
from moaic.compile.planning import (
    Planning,
    TriedPlan,
    autotune,
    check_float8,
    check_options,
    expected_steps,
    graph_mode,
    measure,
    prepare,
    request_of,
    when_to_compile,
)
from moaic.compile.step import Key, Step, StepCall
from moaic.compile.step_clock import StepClock
from moaic.device.handles import is_ours, tensor_of, view_of
from moaic.device.host_tensor_cache import cached_buffer, uploaded
from moaic.device.lifecycle import LIFECYCLE
from moaic.device.registration import register
from moaic.ir.errors import Diagnostic
from moaic.planner import log
from moaic.precision import PRECISION, float8_recipe
from moaic.runtime.controller import session
from moaic.runtime.controller.accelerator import Accelerator
from moaic.runtime.controller.buffer import Buffer, row_major, whole
from moaic.runtime.dtypes import DTYPE_NAMES
from moaic.runtime.host.env_flags import CompileMode, GraphMode
from moaic.runtime.protocol.shortage import Shortage
from moaic.support import progress
from moaic.support.report import Report


@checks_options(check_options)
@takes_precision
@captures_whole
def moai(
    graph_module: Any, examples: Sequence[Any], *, options: Mapping[str, object] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """`torch.compile(model, backend="moai", options={...})`: plan a graph and run it on all workers.

    The options of a plan are pp, dp, cp, ep, tp, micro_batches, schedule, stage_shares, recompute, loss_chunks,
    gather_keys, distribute_param and distribute_low_prec_param; the default of each is its entry in the environment
    variable MOAI_PLAN, else "auto". Further options:

    * `precision="bf16"`: the model computes as under autocast, and its parameters keep their type; `"float8"`: linear
      layers compute in eight-bit floats, too.
    * `compile=False`, or MOAI_COMPILE=0: workers run ops one by one instead of compiled functions. By default they do
      so until the functions are compiled, in the background; `compile="wait"` waits for the compiler instead.
    * `autotune=3`, or MOAI_AUTOTUNE: the best three plans run for a few steps first, and the fastest is taken.
    * `expected_steps=50`, or MOAI_EXPECTED_STEPS: plans that take long to compile must pay off in that many steps;
      1,000 by default, or what a `Trainer` is going to run.
    * `cuda_graphs=True`, MOAI_CUDA_GRAPHS=1, or `mode="reduce-overhead"`: GPUs capture steps and replay them. By
      default these are steps in which GPUs do not communicate, with `cuda_graphs=False` none.

    Raises Diagnostic if no plan can meet the options.
    """
    if place := assignment_of_data(graph_module):
        log.data_assigned(place)
        # Dynamo goes on to the functions and modules that this one calls.
        raise SkipFrame(place)
    if any(isinstance(each, Tensor) and each.is_nested for each in examples):
        log.nested()
        raise SkipFrame("it is given nested tensors")
    given = options or {}
    request, when, graphs = request_of(given), when_to_compile(given), graph_mode(given, mode)
    piece, steps = piece_of(graph_module), expected_steps(given)
    register()
    LIFECYCLE.ensure_started()  # a graph without operands creates the first device tensors of the program
    prepare()
    if recipe := float8_recipe(given.get(PRECISION)):
        check_float8()
        in_float8(graph_module, recipe)
    with Report.current().timed("capture_s"), session.SESSION.phase("capturing"), progress.shown("Capturing"):
        run = capture_backend(
            graph_module,
            examples,
            lambda program: GraphEngine(
                program, Planning(request, piece, steps, autotune(given, when, graphs)), compiling=when, graphs=graphs
            ),
        )
    measure()
    return run


class GraphEngine:
    """Runs the steps of one captured graph: one step for all sizes of its calls that it is right for."""

    def __init__(
        self,
        program: FxProgram,
        planning: Planning,
        *,
        compiling: CompileMode = CompileMode.BEFOREHAND,
        graphs: GraphMode = GraphMode.NEVER,
    ) -> None:
        self._program = program
        self._planning = planning
        self._compiling = compiling
        self._graphs = graphs
        self._steps: dict[Captured, Step] = {}
        self._constants: dict[Captured, list[Buffer]] = {}

    def forward(self, instance: Instance, arguments: list[Tensor]) -> tuple[Sequence[Tensor], StepCall | None]:
        """Runs or defers the forward; returns outputs and updates, each on the device where the program has it.

        The call, for the backward, is None for a graph that computes nothing.
        """
        captured = instance.captured
        if not captured.function.results:
            return [], None
        accelerator = session.accelerator()
        step = self._step(captured, accelerator)
        inputs = self._inputs(accelerator, captured, arguments) + self._constants[captured]
        outputs, call = step.forward(inputs, _key(captured), instance.sizes)
        return _tensors(accelerator, instance, outputs, slice(captured.forward_results)), call

    def backward(self, instance: Instance, call: StepCall, tangents: list[Tensor]) -> Sequence[Tensor]:
        """Runs the backward of `call`; returns gradients on the devices of their arguments."""
        accelerator = session.accelerator()
        step = self._step(instance.captured, accelerator)
        given = [_buffer(accelerator, tensor) for tensor in tangents]
        grads = step.backward(call, given)
        return _tensors(accelerator, instance, grads, slice(instance.captured.forward_results, None))

    def _inputs(self, accelerator: Accelerator, captured: Captured, arguments: list[Tensor]) -> list[Buffer]:
        """Buffers with the values of the arguments; host copies of parameters and buffers are cached between calls."""
        if all(map(is_ours, arguments)):
            return [_buffer(accelerator, tensor) for tensor in arguments]
        roles = [captured.function.param_role(index).kind for index in range(len(arguments))]
        return [
            cached_buffer(accelerator, tensor)
            if kind in ("param", "buffer") and not is_ours(tensor)
            else _buffer(accelerator, tensor)
            for kind, tensor in zip(roles, arguments, strict=True)
        ]

    def run_op_by_op(self, reason: Diagnostic) -> None:
        log.op_by_op(reason.message)

    def _ran(self, seconds: float) -> None:
        self._planning.ran(seconds, is_compiled=self._compiling is not CompileMode.NEVER)

    def move_on(self, tried: TriedPlan, shortage: Shortage, forgive: Callable[[], bool]) -> bool:
        """Whether another plan takes the place of one that ran out of memory.

        In all steps, as each moves the parameters to the layouts of its own plan.
        """
        if not self._planning.move_on(tried, shortage, forgive):
            return False
        for step in self._steps.values():
            step.forget_plans()
        return True

    def fitted(self) -> None:
        self._planning.fitted()

    def _step(self, captured: Captured, accelerator: Accelerator) -> Step:
        if captured not in self._steps:
            for before in list(self._steps)[-1:]:
                sizes = captured.symbols.example
                with self._planning.logged():
                    log.another_program(sizes, before.symbols.broken(tuple(sizes.values())))
            self._constants[captured] = [uploaded(accelerator, tensor) for tensor in captured.constants]
            self._steps[captured] = Step(
                captured.function,
                accelerator,
                self._planning.plan,
                compiling=self._compiling,
                graphs=self._graphs,
                symbols=captured.symbols,
                elsewhere=lambda sizes: self._step(self._program.instantiate(sizes).captured, accelerator),
                clock=None if captured.symbols.example else StepClock(self._ran),
                alternatives=self,
            )
        return self._steps[captured]


def _key(captured: Captured) -> Key:
    """The key of a call's random ops, drawn from the generator that `torch.manual_seed` seeds."""
    if not captured.has_key:
        return 0, 0
    words = torch.randint(torch.iinfo(torch.int64).max, (2,), generator=torch.default_generator, device="cpu")
    return int(words[0]), int(words[1])


def _buffer(accelerator: Accelerator, tensor: Tensor) -> Buffer:
    """A contiguous buffer that holds exactly the values of a tensor."""
    if not is_ours(tensor):
        return uploaded(accelerator, tensor)
    view = view_of(tensor)
    if view.is_whole and view.strides == row_major(view.shape):
        return view.buffer
    made = accelerator.buffer(DTYPE_NAMES[view.dtype], tuple(view.shape), row_major(tuple(view.shape)))
    accelerator.launch("aten.clone", (view,), {"memory_format": torch.contiguous_format}, (made,))
    return made


def _tensors(accelerator: Accelerator, instance: Instance, buffers: Sequence[Buffer], part: slice) -> list[Tensor]:
    """The results `part` of a program, held by `buffers`, as tensors of the device or the host."""
    results = zip(buffers, instance.results[part], instance.captured.on_host[part], strict=True)
    return [_tensor(accelerator, buffer, type_.shape, on_host) for buffer, type_, on_host in results]


def _tensor(accelerator: Accelerator, buffer: Buffer, shape: tuple[int, ...], on_host: bool) -> Tensor:
    if on_host:
        return accelerator.download(whole(buffer))
    return tensor_of(buffer, shape, row_major(shape))
