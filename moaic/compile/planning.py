"""The plan of each step of one compiled model: searched for the first variant, and used again for the others."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, partial
from math import gcd
from pathlib import Path
from typing import Final

import torch

from moaic.capture.pieces import Piece
from moaic.compile import training_loop
from moaic.compile.oom_advice import Capacity, OversizedStep, advice
from moaic.compile.plan_runner import PlanRunner
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.ir.sizes import number_at
from moaic.ir.specialize import in_example, specialized, symbols_of
from moaic.ir.symbols import Numbers, Symbols
from moaic.ir.types import HALF
from moaic.options import AUTOTUNE, COMPILE, CUDA_GRAPHS, EXPECTED_STEPS, NO_DECISIONS, check_backend_options
from moaic.passes.build import build
from moaic.passes.config import Config, Request
from moaic.passes.estimate import step_time
from moaic.passes.estimate.memory import fused_functions, localized_functions, memory_of, split_peak
from moaic.passes.lowering.plan import Plan
from moaic.passes.perf.fusion import op_by_op
from moaic.passes.perf.machine import Machine
from moaic.passes.sharding.data_parallel import batch_size
from moaic.passes.sharding.solver.costs import coefficients_of
from moaic.planner import log
from moaic.planner.autotune import Autotune
from moaic.planner.candidates import candidates, check_request, check_workers, fitting, relaxed
from moaic.planner.dump import dump
from moaic.planner.measured import SHORT
from moaic.planner.memory_fit import Sized
from moaic.planner.plan_cache import has_plans, remember, search_cached
from moaic.planner.processes import ProcessPool
from moaic.planner.relax import dropped_decisions, relax
from moaic.planner.request import parse_request, request_from
from moaic.planner.search import NoPlanFits, Selection, search
from moaic.runtime.controller import session
from moaic.runtime.controller.calibrate import memory_per_worker
from moaic.runtime.controller.errors import EarlierFailure
from moaic.runtime.host import env_flags
from moaic.runtime.host.cores import cores
from moaic.runtime.host.env_flags import CompileMode
from moaic.runtime.host.flavors import flavors
from moaic.runtime.host.gpus import CPU, usable
from moaic.runtime.host.memory import USABLE
from moaic.runtime.host.worker_kinds import asked_device, emulated_target
from moaic.runtime.protocol.shortage import Shortage
from moaic.support import environment, excepthook, logging_setup, progress
from moaic.support.cache_folder import cache_folder
from moaic.support.kernel_profile import measured_kernels
from moaic.support.report import Report
from moaic.support.this_machine import forget_old_measurements, idle_bytes, this_machine
from moaic.text.units import mib

CAUTION = 0.7
"""Share of a worker's memory that advice counts on after a plan ran out of memory although it was predicted to fit."""

SAVED: Final = 0.05
"""Share of the memory of a plan that ran out of it which another plan must save at least."""

FAR: Final = 1.3
"""Ratio of measured and predicted seconds from which on the machine is measured anew, if that was long ago."""

PRODUCTS = frozenset({"aten.mm", "aten.bmm"})

REDUCE_OVERHEAD = "reduce-overhead"
"""The mode of `torch.compile` that captures CUDA graphs and replays them."""


def when_to_compile(options: Mapping[str, object]) -> CompileMode:
    """When programs are compiled, by an option whose default is MOAI_COMPILE.

    The time at which programs change over from op by op to compiled decides last bits, so where PyTorch is asked for
    determinism, all steps run compiled.
    """
    # Workers that emulate a GPU are there for its kernels.
    usual = os.environ.get(env_flags.COMPILE_VARIABLE) or (env_flags.WAIT if _is_emulation() else True)
    asked = options.get(COMPILE)
    when = env_flags.says_when(COMPILE, usual if asked is None else asked)
    is_timed = when is CompileMode.BACKGROUND and torch.are_deterministic_algorithms_enabled()
    return CompileMode.BEFOREHAND if is_timed else when


def _is_emulation() -> bool:
    """Whether workers emulate a GPU."""
    return emulated_target(asked_device(os.environ) or CPU) is not None


def graph_mode(options: Mapping[str, object], mode: str | None = None) -> env_flags.GraphMode:
    """Which steps GPUs replay as CUDA graphs: as said by `mode`, by an option, or by MOAI_CUDA_GRAPHS.

    Raises Diagnostic for a mode that this backend does not have.
    """
    if mode not in (None, "default", REDUCE_OVERHEAD):
        raise Diagnostic(
            f"backend moai has no mode {mode!r}",
            hint=f"valid: default, {REDUCE_OVERHEAD} (GPUs capture steps and replay them)",
        )
    if mode == REDUCE_OVERHEAD:
        return env_flags.GraphMode.ALWAYS
    asked = options.get(CUDA_GRAPHS)
    if asked is None:
        asked = os.environ.get(env_flags.GRAPHS_VARIABLE) or None
    if asked is None:
        is_plain = when_to_compile(options) is CompileMode.NEVER
        return env_flags.GraphMode.NEVER if is_plain else env_flags.GraphMode.ALONE
    return env_flags.GraphMode.ALWAYS if env_flags.says_yes(CUDA_GRAPHS, asked) else env_flags.GraphMode.NEVER


def expected_steps(options: Mapping[str, object]) -> int:
    """The steps over which the time to compile is spread: of the option, MOAI_EXPECTED_STEPS, or the training loop."""
    asked = options.get(EXPECTED_STEPS) or os.environ.get(env_flags.STEPS_VARIABLE)
    if asked:
        return env_flags.says_count(EXPECTED_STEPS, asked)
    return training_loop.planned_steps() or step_time.EXPECTED_STEPS


def autotune(options: Mapping[str, object], when: CompileMode, graphs: env_flags.GraphMode) -> Autotune | None:
    """What runs the best candidates, if the option or MOAI_AUTOTUNE asks for more than one."""
    asked = options.get(AUTOTUNE) or os.environ.get(env_flags.AUTOTUNE_VARIABLE) or 1
    count = env_flags.says_count(AUTOTUNE, asked)
    if count == 1:
        return None
    compiled = when is not CompileMode.NEVER
    mode = f"{'compiled' if compiled else 'op by op'}, graphs: {graphs.value}"
    return Autotune(count, PlanRunner(session.accelerator(), compiled, graphs), mode)


def check_float8() -> None:
    """Raises Diagnostic where a GPU cannot multiply eight-bit floats; CPUs can, slowly."""
    flavor = session.SESSION.flavor()
    lacking = [gpu.name for gpu in usable(os.environ)[: flavor.gpus] if not gpu.has_float8]
    if lacking:
        raise Diagnostic(f"{lacking[0]} has no products of eight-bit floats", hint="choose precision=bf16")


def request_of(options: Mapping[str, object]) -> Request:
    """The decisions that the user fixed: options of `torch.compile`, and MOAI_PLAN for those that they leave open."""
    given = request_from({name: value for name, value in options.items() if name not in NO_DECISIONS})
    ambient = parse_request(os.environ.get("MOAI_PLAN", ""))
    asked = {field.name: getattr(given, field.name) for field in fields(Request)}
    return Request(**{name: getattr(ambient, name) if value is None else value for name, value in asked.items()})


def check_options(options: Mapping[str, object], mode: str | None) -> None:
    """Raises Diagnostic for options and a mode of `torch.compile` that no step could be planned with.

    The number of workers is known once they run.
    """
    excepthook.install()
    check_backend_options(options)
    graph_mode(options, mode)
    request = request_of(options)
    if session.SESSION.is_running():
        check_workers(session.SESSION.flavor().workers, request)


def prepare() -> None:
    """Starts workers and, before there are any plans, planner processes: they load while the graph is captured."""
    excepthook.install()
    environment.check(os.environ)
    logging_setup.install(os.environ)
    session.accelerator().while_waiting(progress.Waits())
    if not has_plans(cache_folder(os.environ)):
        _pool().start()


def measure() -> None:
    """Measure this machine now: measuring runs all deferred work, so there must not be any yet."""
    with session.SESSION.phase("measuring"):
        this_machine()


class OpenSizesError(Exception):
    """A plan cannot be made with open sizes: some are equal, and no polynomial says so. It can for their numbers."""


class Planning:
    """Plans all variants of the steps of one captured graph: those whose batches split alike by one configuration."""

    def __init__(
        self,
        request: Request,
        piece: Piece,
        steps: int = step_time.EXPECTED_STEPS,
        autotune: Autotune | None = None,
    ) -> None:
        """A request that the first graph of a whole model cannot follow is an error; others relax it."""
        self.request = request
        self._steps = steps
        self._autotune = autotune
        self._piece = piece
        self._configs: dict[int, Config] = {}
        """By the equal parts into which a batch falls, what its steps are planned by."""
        self._limit: int | None = None
        """Bytes that plans may need, where one ran out of memory although it was predicted to fit."""
        self._ran_short: set[tuple[Config, int]] = set()
        """Plans that ran out of memory, and the bytes that they were predicted to need."""
        self._to_remember: Callable[[], None] | None = None
        self._predicted: float | None = None
        """Seconds of a step without its optimizer."""

    def plan(self, step: Module) -> Plan:
        """The plan for `step`; raises Diagnostic where the request cannot be met, and OpenSizesError."""
        report = Report.current()
        symbols, rows = symbols_of(step), batch_size(step.main)
        parts = self._parts(rows)
        config = self._configs.get(parts)
        try:
            with report.timed("planning_s"), self.logged():
                plan = self._first(step) if config is None else self._again(step, config)
        except EarlierFailure as failure:
            raise failure.error from None
        except (AssertionError, RuntimeError) as error:
            if symbols is None:
                raise
            raise OpenSizesError from error
        self._configs.setdefault(parts, plan.config)
        self._piece.model.is_planned = True
        if symbols is not None:
            symbols.check(_Fits(plan, self._machine().memory))
            # A batch of more equal parts has its own plan: an odd one, the last of an epoch, must not decide for all.
            symbols.check(lambda numbers: self._parts(number_at(rows, numbers)) <= parts)
        report.plan = str(plan.config)
        session.SESSION.planned(report.plan, plan.programs.joint.mesh)
        return plan

    def _parts(self, rows: int) -> int:
        """Into how many equal parts so many rows fall, of those that were asked for or of the workers."""
        asked = (self.request.dp or 1) * (self.request.micro_batches or 1)
        return gcd(rows, asked if asked > 1 else self._machine().workers)

    def logged(self) -> AbstractContextManager[None]:
        """A context in which the log says each thing of this model once."""
        model = self._piece.model
        return log.of_model(model.said, is_first=not model.is_planned)

    def ran(self, seconds: float, *, is_compiled: bool) -> None:
        """Logs what a step took beside what was predicted; far apart, old measurements of the machine are dropped.

        Not for short steps, of which calls are most, nor for those op by op: predictions are for compiled functions.
        Nothing is logged of emulated GPUs, whose seconds say nothing.
        """
        if self._predicted is None or not self._piece.is_whole or _is_emulation():
            return
        log.measured(seconds, self._predicted)
        is_far = max(seconds / self._predicted, self._predicted / seconds) > FAR
        if is_compiled and is_far and self._predicted > SHORT and forget_old_measurements():
            log.measured_anew()

    def move_on(self, tried: TriedPlan, shortage: Shortage, forgive: Callable[[], bool]) -> bool:
        """Whether another plan takes the place of one under which a worker ran out of memory; warns of it.

        Plans that are predicted to need as much are left out, and so are those that need more than the worker had.
        `forgive` says whether the failed run may be sent again.
        """
        failed = tried.plan.config, tried.peak
        if failed in self._ran_short:
            return False
        self._ran_short.add(failed)
        parts = self._parts(batch_size(tried.step.main))
        if self._limit is not None and self._limit < tried.peak and self._configs.get(parts) != tried.plan.config:
            # Another step of the model has moved on already.
            return forgive()
        found = self._next(tried, tried.limit(shortage))
        if found is None or not forgive():
            self._to_remember = None
            return False
        selection, request, self._limit = found
        config = self._configs[parts] = selection.plan.config
        self._take(tried.step, selection, request)
        log.moved_on(tried.plan.config, tried.peak, str(shortage), config, _need(selection, apart=tried.apart))
        # If the worker had what was predicted, the next program would run out of memory, too.
        is_wrong = self._to_remember is not None or shortage.held + shortage.free >= tried.peak
        self._to_remember = partial(self._remember, tried.step, selection, request) if is_wrong else None
        return True

    def fitted(self) -> None:
        """Takes note that a run has fitted in memory: if it is the first of another plan, that goes to the cache."""
        if self._to_remember is not None:
            self._to_remember()
            self._to_remember = None

    def _next(self, tried: TriedPlan, limit: int) -> tuple[Selection, Request, int] | None:
        """The best plan for a run that may need `limit` bytes, the request that it follows, and the memory it is for.

        None if there is none. Nothing is measured for it: the device is in the middle of a step.
        """
        pool, memory = _pool(), self._machine().memory
        memory = memory if tried.apart else min(memory, limit)
        with pool.turn, log.silent(), session.SESSION.phase("planning"):
            try:
                while True:
                    machine = replace(this_machine(), memory=memory)
                    selection, request = self._selected(tried.example, machine, measures=False)
                    if _need(selection, apart=tried.apart) <= limit:
                        return selection, request, memory
                    # Plans are selected by what they need in one program, and this one needs too much in two.
                    memory = int((1 - SAVED) * _need(selection, apart=False))
            except Diagnostic:
                return None
            finally:
                pool.rest()

    def _machine(self) -> Machine:
        """This machine, with the memory that plans may use."""
        machine = this_machine()
        return machine if self._limit is None else replace(machine, memory=self._limit)

    def _first(self, step: Module) -> Plan:
        """Searches for a plan; threads take turns, as they share the planner's processes."""
        with _pool().turn:
            self._warn_of_precision(step)
            return self._search(step)

    def _again(self, step: Module, config: Config) -> Plan:
        """The plan of a later variant, by the configuration of the first if that is possible."""
        try:
            plan = build(step, config, coefficients_of(this_machine()))
        except Diagnostic:
            return self._first(step)
        symbols = symbols_of(step)
        if symbols is None and self._limit is None:
            return plan
        numbers = {} if symbols is None else symbols.example_numbers()
        return plan if _Fits(plan, self._machine().memory)(numbers) else self._first(step)

    def _warn_of_precision(self, step: Module) -> None:
        """Warns once of each 16-bit type in which this machine multiplies more slowly than in float32."""
        said, machine = self._piece.model.said, this_machine()
        types = {op.results[0].type.dtype for function in step.functions for op in function.ops if op.name in PRODUCTS}
        for dtype in sorted(types & HALF - said):
            factor = machine.slowdown(dtype)
            if factor > 1:
                said.add(dtype)
                log.narrow_is_slower(dtype, factor)

    def _search(self, step: Module) -> Plan:
        try:
            with session.SESSION.phase("planning"), progress.shown("Planning") as line:
                _pool().progress = None if line is None else line.show
                selection, request = self._selected(step, self._machine())
        except NoPlanFits as error:
            sized = [(each.config, each.memory) for each in error.candidates if each.memory is not None]
            hint = _advice(step, error.request, sized, whole=self._piece.is_whole)
            raise Diagnostic(error.message, hint=hint) from None
        except KeyboardInterrupt:
            log.interrupted()
            raise
        if folder := os.environ.get("MOAI_DUMP"):
            dump(Path(folder), step, selection)
        _pool().rest()
        self._take(step, selection, request)
        return selection.plan

    def _take(self, step: Module, selection: Selection, request: Request) -> None:
        """Takes note of the selected plan, for advice and comparison."""
        chosen = selection.search_result.of(selection.search_result.selected)
        assert chosen.memory is not None
        assert chosen.prediction is not None
        self._predicted = chosen.prediction.seconds.value - chosen.prediction.of("optimizer")
        sized = [(chosen.config, chosen.memory)]
        session.accelerator().explain_shortage(partial(_after_all, step, request, sized, self._piece.is_whole))

    def _remember(self, step: Module, selection: Selection, request: Request) -> None:
        """Has the next program take the plan from the cache."""
        remember(
            step,
            this_machine(),
            request,
            selection.search_result,
            folder=cache_folder(os.environ),
            steps=self._steps,
            autotune=self._autotune if step.main.gradients else None,
        )

    def _selected(self, step: Module, machine: Machine, *, measures: bool = True) -> tuple[Selection, Request]:
        """The best plan and the request that it follows: the user's, relaxed where the step cannot follow it."""
        if self._piece.is_strict:
            return self._asked_for(step, machine, measures=measures), self.request
        check_request(step, machine.workers, self.request)
        try:
            candidates(step, machine.workers, self.request)
            return self._asked_for(step, machine, measures=measures), self.request
        except NoPlanFits:
            raise
        except Diagnostic as reason:
            kept = relax(step, machine, self.request)
            if kept == self.request:
                raise
            selection = self._cached(step, machine, kept, measures=measures)
            self._log_relaxed(
                step, dropped_decisions(self.request, kept), selection.search_result.selected, reason.message
            )
            return selection, kept

    def _asked_for(self, step: Module, machine: Machine, *, measures: bool) -> Selection:
        selection = self._cached(step, machine, self.request, measures=measures)
        # An evaluation drops decisions about the batch by itself, which does not show whether training can follow them.
        self._piece.model.has_followed |= relaxed(step, self.request) == self.request
        return selection

    def _cached(self, step: Module, machine: Machine, request: Request, *, measures: bool) -> Selection:
        if not measures:
            return search(step, machine, request, pool=_pool(), steps=self._steps)
        folder = cache_folder(os.environ)
        # Only the step that trains runs often enough for it to pay.
        autotune = self._autotune if step.main.gradients else None
        return search_cached(
            step,
            machine,
            request,
            pool=_pool(),
            folder=folder,
            steps=self._steps,
            measure=measured_kernels,
            autotune=autotune,
        )

    def _log_relaxed(self, step: Module, dropped: str, config: Config, reason: str) -> None:
        """Warns once for each graph of a model in pieces, else once for all batches that drop the same decisions."""
        place = "" if self._piece.is_whole else _place(step)
        if place and fitting(step, self.request) != self.request:
            reason = f"the first tensor that it is given has {batch_size(step.main)} rows"
        said = self._piece.model.said
        if (kind := f"{place} {dropped}") not in said:
            said.add(kind)
            log.plan_relaxed(dropped, config, reason, place)


def fits_op_by_op(plan: Plan, symbols: Symbols, sizes: tuple[int, ...] = ()) -> bool:
    """Whether a plan is predicted to fit in memory while its functions run op by op, without fusion.

    `sizes` are the numbers of the symbols; without, those of the example.
    """
    numbers = symbols.numbers(sizes) if sizes else symbols.example_numbers()
    # Of numbers, as each comparison of open sizes is a condition of the program.
    at = plan.at(numbers) if numbers else plan
    return memory_of(at, localized_functions(op_by_op)).peak <= this_machine().memory


class _Fits:
    """Whether a plan for open sizes is predicted to fit in memory with the sizes of a call."""

    def __init__(self, plan: Plan, memory: int) -> None:
        self._plan = plan
        self._memory = memory
        self._fitting: list[Numbers] = []
        """Numbers with which it fits, and so with all that are not larger."""

    def __call__(self, numbers: Numbers) -> bool:
        if any(all(number <= known[name] for name, number in numbers.items()) for known in self._fitting):
            return True
        fits = _peak(self._plan, numbers) <= self._memory
        if fits:
            self._fitting.append(numbers)
        return fits


@dataclass(frozen=True)
class TriedPlan:
    """The plan of a step under which a worker ran out of memory, and the numbers that the symbols had."""

    step: Module
    plan: Plan
    numbers: Numbers
    apart: bool
    """Whether forward and backward were two programs."""

    @property
    def example(self) -> Module:
        """The step at the sizes of the run."""
        return specialized(self.step, self.numbers) if self.numbers else self.step

    @cached_property
    def peak(self) -> int:
        """Bytes that the run was predicted to need per worker."""
        if not self.apart:
            return _peak(self.plan, self.numbers)
        return split_peak(self.plan.at(self.numbers) if self.numbers else self.plan, fused_functions())

    def limit(self, shortage: Shortage) -> int:
        """The most that another plan may be predicted to need: what lacked is saved, and what there was suffices."""
        lacking = max(shortage.asked - shortage.free, self.peak - shortage.held - shortage.free)
        return self.peak - max(lacking, int(SAVED * self.peak))


def _need(selection: Selection, *, apart: bool) -> int:
    """Bytes that the selected plan is predicted to need per worker, with forward and backward `apart` or as one."""
    result = selection.search_result
    memory = result.of(result.selected).memory
    assert memory is not None
    return result.apart if apart else memory.peak


def _peak(plan: Plan, numbers: Numbers) -> int:
    return memory_of(plan.at(numbers) if numbers else plan, fused_functions()).peak


def _place(step: Module) -> str:
    """The place where a graph begins: the first line of the user's source in it."""
    lines = (f"{op.loc.file}:{op.loc.line}" for op in step.main.ops if op.loc.file)
    return next(lines, f"@{step.main.name}")


def _after_all(step: Module, request: Request, sized: Sequence[Sized], whole: bool, shortage: Shortage) -> str:
    """The message and advice for a plan that ran out of memory although it was predicted to fit."""
    ((config, memory),) = sized
    expected = this_machine().memory / USABLE
    had = shortage.held + shortage.free
    # Other programs may have left the worker less than its share, and this program may hold more than the plan counts.
    scale, beside = CAUTION * min(1.0, had / expected), max(0, had - memory.peak)
    ways = _advice(step, request, sized, lambda memory: int(scale * memory) - beside, tried=False, whole=whole)
    return (
        f"the plan {config} was predicted to need {mib(memory.peak)} per worker, and this one could have "
        f"{mib(had)} of the {mib(expected)} of its share\nhint: {ways}"
    )


def _advice(
    step: Module,
    request: Request,
    sized: Sequence[Sized],
    left: Callable[[int], int] = int,
    *,
    tried: bool = True,
    whole: bool = True,
) -> str:
    """Advice on too little memory; `left` maps the memory of a worker to the bytes that are left for plans."""
    step, machine = in_example(step), this_machine()
    now = session.SESSION.flavor()
    others = [flavor for flavor in flavors(os.environ) if not flavor.others and flavor != now]
    capacities = [Capacity(flavor, left(memory_per_worker(flavor, idle_bytes()))) for flavor in others]
    pool = _pool()
    with pool.turn:
        try:
            here = replace(machine, memory=left(machine.memory))
            return advice(OversizedStep(step, request, sized, tried, whole), here, capacities, pool)
        finally:
            pool.rest()


@cache
def _pool() -> ProcessPool:
    """The planner's processes."""
    return ProcessPool(cores())
