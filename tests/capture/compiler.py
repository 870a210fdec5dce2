"""Captures models as `torch.compile` does, and runs what was captured through the reference interpreter."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from moaic.capture.aot import capture_backend
from moaic.capture.fx.captured import Captured, Instance
from moaic.capture.fx.program import FxProgram
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Function, Module, Role
from moaic.ir.verify import verify
from moaic.runtime.interpreter import run_function

# Raised by PyTorch's own modules when they are imported or used.
WARNINGS = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning"),
]

KEY = torch.tensor([7, 11])


@dataclass(eq=False)
class Call:
    """What a forward was given."""

    copies: list[Tensor]


class Interpreted:
    """An engine that runs every function through the reference interpreter."""

    def __init__(self, program: FxProgram) -> None:
        self.program = program
        self.calls = weakref.WeakSet[Call]()

    def forward(self, instance: Instance, arguments: list[Tensor]) -> tuple[Sequence[Tensor], Call]:
        captured = instance.closed
        copies = [argument.detach().clone() for argument in arguments]
        call = Call(copies)
        self.calls.add(call)
        zeros = [
            torch.zeros_like(value)
            for value in (torch.empty(param.type.shape) for param in params(captured.function, "tangent"))
        ]
        return run(captured, copies, zeros)[: captured.forward_results], call

    def backward(self, instance: Instance, call: Call, tangents: list[Tensor]) -> Sequence[Tensor]:
        captured = instance.closed
        return run(captured, call.copies, tangents)[captured.forward_results :]

    def run_op_by_op(self, reason: Diagnostic) -> None:
        raise reason


def params(function: Function, kind: str) -> list[Any]:
    return [value for value, role in zip(function.params, function.param_roles, strict=True) if role.kind == kind]


def labels(roles: Sequence[Role], kind: str) -> set[str]:
    return {role.label for role in roles if role.kind == kind}


def run(captured: Captured, arguments: list[Tensor], tangents: list[Tensor]) -> list[Tensor]:
    function = captured.function
    kinds = {value: value.type.dtype for value in params(function, "tangent")}
    assert len(kinds) == len(tangents)
    # What the forward alone is asked for must not depend on the tangents' element type.
    given = [tensor.to(DTYPES[kind]) for tensor, kind in zip(tangents, kinds.values(), strict=True)]
    key = [KEY] if captured.has_key else []
    module = Module((function,))
    verify(module)
    return [result.clone() for result in run_function(module, "step", [*arguments, *given, *captured.constants, *key])]


DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16}


class Compiler:
    """Compiles models for `Interpreted`, and keeps what was captured."""

    def __init__(self) -> None:
        self.engines: list[Interpreted] = []

    def __call__(self, model: Any, **settings: Any) -> Any:
        def make(program: FxProgram) -> Interpreted:
            self.engines.append(Interpreted(program))
            return self.engines[-1]

        def backend(graph: Any, examples: Sequence[Any]) -> Callable[..., Any]:
            return capture_backend(graph, examples, make)

        return torch.compile(model, backend=backend, **settings)

    def function(self, index: int = -1) -> Function:
        return self.captured(index).function

    def captured(self, index: int = -1) -> Captured:
        return self.engines[index].program.instantiate().closed
