"""A compiled model has no second derivative, and never one that is wrong: whatever it is taken to, it is an error."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moaic.device.torch_private import DIFFERENTIATED_TWICE
from tests.capture.compiler import WARNINGS, Compiler

pytestmark = WARNINGS


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))


class Heads(nn.Module):
    """Outputs that are views of one result."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.body(x).tanh()
        return found.view(-1), found.unsqueeze(0).transpose(1, 2)


def asked(total: Tensor, to: Sequence[Tensor]) -> None:
    torch.autograd.grad(total, to)


def maybe_unused(total: Tensor, to: Sequence[Tensor]) -> None:
    torch.autograd.grad(total, to, allow_unused=True)


def to_inputs(total: Tensor, to: Sequence[Tensor]) -> None:
    total.backward(inputs=to)


def to_all(total: Tensor, to: Sequence[Tensor]) -> None:
    total.backward()


@pytest.mark.parametrize(
    ("make", "taken"), [*((small, taken) for taken in (asked, maybe_unused, to_inputs, to_all)), (Heads, asked)]
)
@pytest.mark.parametrize("of", ["parameters", "last bias", "input", "what the input is made of"])
def test_a_second_derivative_is_an_error(
    compiler: Compiler, make: Callable[[], nn.Module], of: str, taken: Callable[[Tensor, Sequence[Tensor]], None]
) -> None:
    model, before = make(), torch.randn(4, 2, requires_grad=True)
    x = before.exp() if of == "what the input is made of" else torch.randn(4, 2, requires_grad=True)
    outputs: Any = compiler(model)(x)
    loss = sum((each.square().sum() for each in outputs), torch.zeros(()))
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    parameters = [*model.parameters()]
    to = {"parameters": parameters, "last bias": parameters[-1:], "input": [x]}.get(of, [before])
    with pytest.raises(RuntimeError, match=DIFFERENTIATED_TWICE):
        taken(loss + slope.square().sum(), to)


def test_gradients_that_could_be_differentiated_are_those_that_could_not(compiler: Compiler) -> None:
    model, x = small(), torch.randn(4, 2)
    loss = compiler(model)(x).square().sum()
    parameters = [*model.parameters()]
    first = torch.autograd.grad(loss, parameters, create_graph=True)
    torch.testing.assert_close(first, torch.autograd.grad(loss, parameters), check_stride=True)
    assert all(each.requires_grad for each in first)
    # What is not differentiated twice may stand beside them.
    (model(x).square().sum() + sum(each.detach().sum() for each in first)).backward()


class Second(nn.Module):
    """Reads what another graph has made."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x).pow(3)


class ViewsInput(Second):
    def forward(self, x: Tensor) -> Any:
        return x.view(-1), super().forward(x)


class WritesInput(Second):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x.mul_(2))


def _last(outputs: Tensor | tuple[Tensor, ...]) -> Tensor:
    return outputs[-1] if isinstance(outputs, tuple) else outputs


@pytest.mark.parametrize("make", [Second, ViewsInput, WritesInput])
def test_each_of_two_graphs_depends_on_its_own_inputs(compiler: Compiler, make: Callable[[], nn.Module]) -> None:
    first, second = small(), make()
    middle = compiler(first)(torch.randn(4, 2))
    last = _last(compiler(second)(middle))
    *_, bias = second.parameters()
    (slope,) = torch.autograd.grad(last.sum(), bias, create_graph=True)
    with pytest.raises(RuntimeError, match=DIFFERENTIATED_TWICE):
        torch.autograd.grad(last.sum() + slope.square().sum(), [*first.parameters()])


@pytest.mark.parametrize("make", [Second, ViewsInput, WritesInput])
def test_graphs_end_with_their_outputs(compiler: Compiler, make: Callable[[], nn.Module]) -> None:
    first, second = compiler(small()), compiler(make())
    middle = first(torch.randn(4, 2))
    nodes = [weakref.ref(middle.grad_fn)]
    last = _last(second(middle))
    nodes.append(weakref.ref(last.grad_fn))
    gc.collect()  # what the compilers left
    gc.disable()
    try:
        del middle, last
        assert all(each() is None for each in nodes), "no circle of references"
    finally:
        gc.enable()
