from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import graph_break
from torch._dynamo.utils import counters


class Broken(torch.autograd.Function):
    """Runs op by op in the middle of compiled code, as what Dynamo cannot read does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        for _ in range(2):  # a break in a loop has Dynamo leave the whole function alone
            graph_break()
            x = x + torch.full(x.shape, 0.5, device=x.device)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (grad,) = grads
        return grad + torch.zeros(grad.shape, device=grad.device)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    broken = cast("Callable[[Tensor], Tensor]", Broken.apply)
    return broken(model(x)).square().sum()


@pytest.mark.filterwarnings("ignore")  # of Dynamo, about itself
def test_what_runs_behind_a_graph_break_is_not_traced() -> None:
    torch.manual_seed(0)
    counters.clear()
    plain, x = nn.Linear(4, 4), torch.randn(2, 4)
    model = nn.Linear(4, 4).to("moai")
    model.load_state_dict(plain.state_dict())
    expected, found = loss(plain, x), torch.compile(loss, backend="moai")(model, x.to("moai"))
    # The loss, the forward and what follows it, some of them twice; the kernels would be dozens more.
    assert counters["frames"]["total"] < 10
    expected.backward()
    found.backward()
    assert torch.allclose(found.cpu(), expected)
    assert plain.weight.grad is not None
    assert model.weight.grad is not None
    assert torch.allclose(model.weight.grad.cpu(), plain.weight.grad)
