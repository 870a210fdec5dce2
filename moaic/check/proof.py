"""Proof of a plan: its programs run on virtual ranks in float64 and give the results of the step on one device."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor

from moaic.capture.trace_only import CapturedCall
from moaic.check.distance import distance, largest
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Function, Module
from moaic.ir.printer import render
from moaic.ir.verify import check_made
from moaic.passes.build import Builder
from moaic.passes.config import Config, Request
from moaic.passes.lowering.programs import Programs, lower
from moaic.passes.transforms.to_float64 import promote
from moaic.planner.candidates import candidates
from moaic.runtime.dtypes import DTYPES
from moaic.runtime.interpreter import run_function, run_ranks
from moaic.runtime.rounding import rounding_by_shape

TOLERANCE = 1e-10
"""Largest distance from the step's result in float64, relative to its largest element."""

FLOOR = 1e-3
"""Least scale of a result, relative to the largest element of all results: distances are relative to the result's own
largest element, and some gradients, such as that of a bias on keys, are zero but for rounding."""

ANY = Request()

KEY = (5, 6)
"""The key of random ops."""


class ProofOutcome(Enum):
    """The outcome of checking one plan."""

    PASS = "pass"
    FAIL = "fail"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One plan, and the distance of its results from those of the step."""

    config: Config
    outcome: ProofOutcome
    loss: float | None = None
    """Distance of the loss, if the step has one."""
    gradient: float | None = None
    """The largest distance of a gradient."""
    where: str = ""
    """The parameter whose gradient that is."""
    reason: str = ""
    """The reason why the plan was dropped or failed."""


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A step in one floating type, and a value for each of its parameters."""

    module: Module
    inputs: tuple[Tensor, ...]

    @property
    def outputs(self) -> int:
        """Number of results that the forward gives; the rest are gradients."""
        return len(self.module.main.outputs)

    def cast(self, dtype: str) -> CapturedStep:
        """This step in another floating type."""
        module = promote(self.module, dtype)
        pairs = zip(self.inputs, module.main.params, strict=True)
        return CapturedStep(module, tuple(tensor.to(DTYPES[param.type.dtype]) for tensor, param in pairs))


def step_of(taken: CapturedCall) -> CapturedStep:
    """A captured step in float64, with arbitrary values for the tangents of everything that it returns."""
    module = promote(Module((taken.captured.function,)))
    return CapturedStep(module, tuple(_values(module.main, taken)))


def _values(function: Function, taken: CapturedCall) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    given, constants = iter(taken.arguments), iter(taken.captured.constants)
    for index, param in enumerate(function.params):
        kind, dtype = function.param_role(index).kind, DTYPES[param.type.dtype]
        if kind == "key":
            yield torch.tensor(KEY)
        elif kind == "tangent":
            yield torch.randn(param.type.shape, generator=generator, dtype=dtype)
        else:
            yield next(constants if kind == "constant" else given).detach().cpu().to(dtype, copy=True)


def plans_of(step: Module, ranks: int, request: Request = ANY) -> list[Config]:
    """The candidates that keep to `request` and take exactly `ranks` ranks. Raises Diagnostic where there is none."""
    return [config for config in candidates(step, ranks, request) if config.ranks == ranks]


def kind_of(config: Config) -> tuple[tuple[str, object], ...]:
    """The kind of a plan: names of its numbers that are not the default, names and values of such words."""
    default = Config()
    pairs = ((each.name, getattr(config, each.name)) for each in fields(config))
    decided = ((name, value) for name, value in pairs if value != getattr(default, name))
    return tuple((name, value if isinstance(value, str) else None) for name, value in decided)


def one_of_each_kind(configs: Sequence[Config]) -> list[Config]:
    """The first candidate of every kind."""
    return list({kind_of(config): config for config in reversed(configs)}.values())[::-1]


def sampled(configs: Sequence[Config], most: int) -> list[Config]:
    """At most `most` candidates, evenly spread over their order."""
    count = min(most, len(configs))
    return [configs[index * len(configs) // count] for index in range(count)]


class Proof:
    """One step, its results on one device, and the verdicts so far; plans with equal programs are run once."""

    def __init__(self, step: CapturedStep) -> None:
        self.step = step
        self.builder = Builder(step.module)
        self._verdicts: dict[str, Verdict] = {}

    @cached_property
    def expected(self) -> list[Tensor]:
        with _one_thread(), rounding_by_shape():
            return run_function(self.step.module, self.step.module.main.name, self.step.inputs)

    @property
    def programs(self) -> int:
        """Number of different programs that have been run."""
        return len(self._verdicts)

    def verdict(self, config: Config, *, halves: bool = True) -> Verdict:
        """Runs the joint program of a plan and, with `halves`, the forward and the backward one after the other.

        A plan whose passes or programs crash has failed, with the exception as its reason; others can still be checked.
        """
        try:
            return self._verdict(config, halves)
        except Diagnostic as reason:
            return Verdict(config, ProofOutcome.DROPPED, reason=reason.message)
        except Exception as error:
            return Verdict(config, ProofOutcome.FAIL, reason=crashed(error))

    def _verdict(self, config: Config, halves: bool) -> Verdict:
        programs = lower(self.builder.build(config).module, ())
        parts = [programs.joint, *([programs.forward, programs.backward] if halves else [])]
        modules = [module for module in parts if module is not None]
        text = "".join(map(render, modules))
        if text not in self._verdicts:
            for module in modules:
                check_made(module, "lower")
            with _one_thread(), rounding_by_shape():
                self._verdicts[text] = self._run(config, programs, halves and programs.backward is not None)
        return replace(self._verdicts[text], config=config)

    def _run(self, config: Config, programs: Programs, halves: bool) -> Verdict:
        ways = {"joint": in_one, **({"forward, then backward": in_halves} if halves else {})}
        verdict = Verdict(config, ProofOutcome.PASS)
        for name, run in ways.items():
            verdict = compared(config, self.step.module.main, run(self.step, programs), self.expected, TOLERANCE)
            if verdict.outcome is not ProofOutcome.PASS:
                return replace(verdict, reason=f"{verdict.reason} ({name})".strip())
        return verdict


def in_one(step: CapturedStep, programs: Programs) -> list[Tensor]:
    """The step's results by the joint program."""
    return run_ranks(programs.joint, [step.inputs[i] for i in programs.joint_params])


def in_halves(step: CapturedStep, programs: Programs) -> list[Tensor]:
    """The step's results by the forward program and then the backward one."""
    assert programs.backward is not None
    forward = run_ranks(programs.forward, [step.inputs[i] for i in programs.forward_params])
    outputs, saved = forward[: step.outputs], forward[step.outputs :]
    return outputs + run_ranks(programs.backward, saved + [step.inputs[i] for i in programs.backward_params])


def compared(
    config: Config, main: Function, results: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float
) -> Verdict:
    """The verdict on `results` of `main`; every result must be within `tolerance`, not only loss and gradients."""
    floor = FLOOR * max(map(largest, expected))
    away = [distance(one, other, floor) for one, other in zip(results, expected, strict=True)]
    roles = [main.result_role(index) for index in range(len(away))]
    gradients = [(apart, role.label) for apart, role in zip(away, roles, strict=True) if role.kind == "grad"]
    gradient, where = max(gradients, default=(None, ""))
    loss = loss_at(main)
    apart, worst = max((apart, f"{role.kind} {role.label}".strip()) for apart, role in zip(away, roles, strict=True))
    fits = apart <= tolerance
    return Verdict(
        config,
        ProofOutcome.PASS if fits else ProofOutcome.FAIL,
        None if loss is None else away[loss],
        gradient,
        where,
        "" if fits else f"{worst} is off by {apart:.1e}",
    )


def crashed(error: Exception) -> str:
    """The exception of a crash, in one line."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def loss_at(main: Function) -> int | None:
    """Index of the loss among the results: the first floating scalar of the forward; None if there is none."""
    for index, value in enumerate(main.results):
        if (
            main.result_role(index).kind == "output"
            and not value.type.shape
            and value.type.dtype.startswith(("f", "b"))
        ):
            return index
    return None


@contextmanager
def _one_thread() -> Generator[None]:
    """Runs the block in one thread: tensors of small models are slower with two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
