"""Captured steps and the values that go into them: what plans are proved on without workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moaic.capture.aot import capture_backend
from moaic.capture.from_fx import Captured, FxProgram
from moaic.ir.graph import Module
from moaic.passes.promote import promote
from tests.exact.models import Example


@dataclass(frozen=True, slots=True)
class Step:
    """A training step in float64 and a value for each of its parameters."""

    module: Module
    inputs: list[Tensor]

    @property
    def outputs(self) -> int:
        """How many of the results the forward gives; the rest are gradients."""
        main = self.module.main
        return sum(main.result_role(index).kind != "grad" for index in range(len(main.results)))


def captured_step(example: Example) -> Step:
    """The step of a model on its batch, with arbitrary values for the tangents of everything that it returns."""
    captured, arguments = _capture(example)
    return Step(promote(Module((captured.function,))), list(_inputs(captured, arguments)))


class _CapturedError(Exception):
    """Carries a captured program out of the call that would have run it."""

    def __init__(self, captured: Captured, arguments: list[Tensor]) -> None:
        super().__init__()
        self.captured = captured
        self.arguments = arguments


class _Engine:
    def __init__(self, program: FxProgram) -> None:
        self.program = program

    def forward(self, captured: Captured, call: int | None, arguments: list[Tensor]) -> Sequence[Tensor]:
        raise _CapturedError(captured, [argument.detach().clone() for argument in arguments])

    def backward(self, captured: Captured, call: int, tangents: list[Tensor]) -> Sequence[Tensor]:
        raise NotImplementedError

    def forget(self, call: int) -> None:
        raise NotImplementedError


def _capture(example: Example) -> tuple[Captured, list[Tensor]]:
    def backend(graph_module: Any, examples: Sequence[Any]) -> Callable[..., Any]:
        return capture_backend(graph_module, examples, _Engine)

    torch.compiler.reset()
    model: Any = torch.compile(example.model(), backend=backend, fullgraph=True)
    try:
        model(**example.batch())
    except _CapturedError as found:
        return found.captured, found.arguments
    raise AssertionError("the model ran without its backend")


def _inputs(captured: Captured, arguments: Sequence[Tensor]) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    given, constants = iter(arguments), iter(captured.constants)
    for index, param in enumerate(captured.function.params):
        kind = captured.function.param_role(index).kind
        if kind == "key":
            yield torch.tensor([5, 6])
        elif kind == "tangent":
            yield torch.randn(param.type.shape, generator=generator, dtype=torch.float64)
        else:
            tensor = next(constants if kind == "constant" else given)
            yield tensor.double() if tensor.is_floating_point() else tensor
