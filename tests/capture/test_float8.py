"""Linear layers of Dynamo's graph replaced by torchao's eight-bit ones; the model keeps its own."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from moaic.capture.float8 import float8_linear, layer_of
from moaic.capture.trace_only import take_call
from moaic.compile import planning
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Function, Module
from moaic.ir.types import FLOAT8
from moaic.ir.verify import verify
from moaic.runtime.controller import session
from moaic.runtime.host.flavors import Flavor
from moaic.runtime.host.gpus import Gpu
from moaic.text.units import GIB
from tests.exact.float8 import RECIPES, is_computed_here

pytest.importorskip("torchao.float8")


checkpoint: Any = getattr(torch.utils.checkpoint, "checkpoint")  # noqa: B009 untyped


class Layers(nn.Module):
    """Two layers that fit, one of an odd width, one whose weight is computed, and the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 48), nn.Linear(48, 64, bias=False)
        self.odd, self.computed, self.last = nn.Linear(64, 20), nn.Linear(20, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.odd(self.second(torch.relu(self.first(x))))
        x = nn.functional.linear(x, self.computed.weight * 2)
        return self.last(x).float().pow(2).mean()


X = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


def taken(model: nn.Module, precision: str = "float8") -> Function:
    function = take_call(model, {"x": X}, {"precision": precision}).captured.function
    verify(Module((function,)))
    return function


def products(function: Function) -> Counter[str]:
    """Products by name, and casts to eight bits."""
    casts = Counter(f"to {op.attrs['dtype']}" for op in function.ops if op.attrs.get("dtype") in FLOAT8)
    return casts + Counter(op.name for op in function.ops if op.name in ("aten.mm", "moai.scaled_mm"))


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        # The first layer's input needs no gradient. Gradients of the weights of both layers are bfloat16.
        ("float8", {"moai.scaled_mm": 3, "aten.mm": 2 + 3 * 3, "to f8e4m3fn": 6}),
        ("float8_rowwise", {"moai.scaled_mm": 5, "aten.mm": 3 * 3, "to f8e4m3fn": 10}),
        # One scale for all: what a forward has cast a backward makes again, but nothing is cast twice in either.
        ("float8_tensorwise", {"moai.scaled_mm": 5, "aten.mm": 3 * 3, "to f8e4m3fn": 7, "to f8e5m2": 2}),
    ],
)
def test_layers_that_fit_are_taken(precision: str, expected: dict[str, int]) -> None:
    assert products(taken(Layers(), precision)) == expected


def test_the_model_stays_what_it_is() -> None:
    model = Layers()
    before = copy.deepcopy(model.state_dict())
    function = taken(model)
    assert type(model.first) is nn.Linear
    assert {param.type.dtype for param in function.params} == {"f32"}
    assert {result.type.dtype for result in function.results} == {"f32"}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.inner, x, use_reentrant=False)
        return self.last(torch.relu(x)).float().sum()


def test_layers_that_are_checkpointed_are_taken() -> None:
    assert products(taken(Checkpointed()))["moai.scaled_mm"] == 1


class KeptOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            x = self.inner(x)
        return self.last(x).float().sum()


def test_what_a_model_keeps_out_of_autocast_stays_wide() -> None:
    assert set(products(taken(KeptOut()))) == {"aten.mm"}


@pytest.mark.parametrize("precision", [each for each in RECIPES if is_computed_here(each)])
def test_a_layer_is_close_to_the_one_it_stands_for(precision: str) -> None:
    layer, x = nn.Linear(32, 48), X.clone().requires_grad_()
    y = layer(x)
    expected = torch.autograd.grad(y.pow(2).sum(), (x, layer.weight, layer.bias))
    with torch.autocast("cpu", torch.bfloat16):
        narrow = float8_linear(x, layer.weight, layer.bias, RECIPES[precision])
    found = torch.autograd.grad(narrow.float().pow(2).sum(), (x, layer.weight, layer.bias))
    assert narrow.dtype == torch.bfloat16
    assert not torch.equal(narrow.float(), y)
    for ours, theirs in zip((narrow, *found), (y, *expected), strict=True):
        assert (ours - theirs).norm() < 0.05 * theirs.norm()


def test_scales_of_other_forms_are_planned_whole() -> None:
    def product(x: Tensor) -> Tensor:
        narrow, one = x[0].to(torch.float8_e4m3fn), torch.ones(())
        bias = torch.ones(16, dtype=torch.bfloat16)
        return torch.ops.aten._scaled_mm.default(narrow, narrow.t(), one, one, bias, None, torch.bfloat16)

    function = take_call(product, {"x": X}).captured.function
    assert "aten._scaled_mm" in {op.name for op in function.ops}


def test_a_gpu_without_them_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Gpu("NVIDIA H100", GIB, "sm_90"), Gpu("NVIDIA A100", GIB, "sm_80")]

    def usable(environment: Mapping[str, str]) -> list[Gpu]:
        return found

    monkeypatch.setattr(planning, "usable", usable)
    monkeypatch.setattr(session.SESSION, "flavor", lambda: Flavor("Small", 1, GIB, gpus=1))
    planning.check_float8()
    monkeypatch.setattr(session.SESSION, "flavor", lambda: Flavor("Medium", 2, GIB, gpus=2))
    with pytest.raises(Diagnostic, match="NVIDIA A100 has no products of eight-bit floats\nhint: choose"):
        planning.check_float8()


def test_torchao_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    layer_of.cache_clear()
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    said = r"are torchao's, which cannot be imported: .*\n.*pip install 'moaic\[float8\]'"
    with pytest.raises(Diagnostic, match=said):
        taken(Layers())
