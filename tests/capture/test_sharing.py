"""Results of compiled functions share the memory that they share under `aot_eager`, with equal strides and offsets."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from moaic.capture.aot import capture_backend
from moaic.capture.fx.captured import Captured, Instance
from moaic.capture.fx.program import FxProgram
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.runtime.dtypes import DTYPES
from moaic.runtime.interpreter import run_function

sys.path.insert(0, str(Path(__file__).parent))

from sharing import FUNCTIONS, LAYOUTS, behaviour

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of Dynamo, about graph breaks and gradients of what is no leaf
]


class Interpreted:
    """An engine that gives results memory of their own, row-major, as workers do."""

    def __init__(self, program: FxProgram) -> None:
        pass

    def forward(self, instance: Instance, arguments: list[Tensor]) -> tuple[Sequence[Tensor], list[Tensor]]:
        captured = instance.closed
        given = [argument.detach().clone() for argument in arguments]
        params = zip(captured.function.params, captured.function.param_roles, strict=True)
        types = [value.type for value, role in params if role.kind == "tangent"]
        tangents = [torch.zeros(kind.shape, dtype=DTYPES[kind.dtype]) for kind in types]
        return _run(captured, given, tangents)[: captured.forward_results], given

    def backward(self, instance: Instance, call: list[Tensor], tangents: list[Tensor]) -> Sequence[Tensor]:
        captured = instance.closed
        return _run(captured, call, tangents)[captured.forward_results :]

    def run_op_by_op(self, reason: Diagnostic) -> None:
        raise reason


def _run(captured: Captured, given: list[Tensor], tangents: list[Tensor]) -> list[Tensor]:
    found = run_function(Module((captured.function,)), "step", [*given, *tangents, *captured.constants])
    return [result.clone(memory_format=torch.contiguous_format) for result in found]


def _interpreted(graph_module: Any, examples: Sequence[Any]) -> Any:
    return capture_backend(graph_module, examples, Interpreted)


def _shown(name: str, layout: str, backend: Any, *, trained: bool, dynamic: bool | None) -> list[Any]:
    torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage]
    compiled = torch.compile(FUNCTIONS[name], backend=backend, dynamic=dynamic)
    return behaviour(compiled, layout, "cpu", trained=trained)


def _agree(expected: Any, found: Any) -> bool:
    if isinstance(expected, list | tuple):
        ours, theirs = cast("Sequence[Any]", found), cast("Sequence[Any]", expected)
        return len(ours) == len(theirs) and all(map(_agree, theirs, ours))
    return bool(expected == pytest.approx(found, rel=1e-9)) if isinstance(expected, float) else expected == found


CASES = list(product(FUNCTIONS, LAYOUTS, (False, True), (None, True, False)))


def _check(name: str, layout: str, trained: bool, dynamic: bool | None) -> None:
    expected = _shown(name, layout, "aot_eager", trained=trained, dynamic=dynamic)
    found = _shown(name, layout, _interpreted, trained=trained, dynamic=dynamic)
    assert _agree(expected, found), f"expected {expected}, found {found}"


@pytest.mark.parametrize(("name", "layout", "trained", "dynamic"), CASES[::29])
def test_results_share_what_they_share_under_aot_eager(
    name: str, layout: str, trained: bool, dynamic: bool | None
) -> None:
    _check(name, layout, trained, dynamic)


@pytest.mark.exact
@pytest.mark.parametrize(("name", "layout", "trained", "dynamic"), CASES)
def test_all_results_share_what_they_share_under_aot_eager(
    name: str, layout: str, trained: bool, dynamic: bool | None
) -> None:
    _check(name, layout, trained, dynamic)
