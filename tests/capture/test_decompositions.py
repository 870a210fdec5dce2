"""Forms of ops that decompositions take in a way of their own, beside plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

Form = Callable[[Tensor, Tensor], Tensor]


def only_a_bias(x: Tensor, bias: Tensor) -> Tensor:
    return functional.conv1d(x.detach().unsqueeze(0), torch.ones(3, 4, 1, device=x.device), bias[:3])


FORMS: Mapping[str, Form] = {
    "products added to nothing": lambda x, bias: torch.baddbmm(bias, x[None], x.t()[None], beta=0, alpha=2),
    "products added to more": lambda x, bias: torch.baddbmm(bias, x[None], x.t()[None], beta=3, alpha=2),
    "a convolution of whose parts a bias alone is trained": only_a_bias,
    "a convolution without a bias": lambda x, bias: functional.conv1d(x[None], bias.expand(2, 4, 4)),
    "a look-up in a number": lambda x, bias: bias.sum().index_select(
        0, torch.zeros(1, dtype=torch.int64, device=x.device)
    ),
    "windows of a number": lambda x, bias: bias.sum().unfold(0, 1, 1) * x,
}


def gradients(run: Form, device: str) -> list[Tensor | None]:
    x, bias = ((torch.arange(float(count)).cos() * 2).to(device) for count in (16, 4))
    leaves = [x.view(4, 4).requires_grad_(), bias.requires_grad_()]
    result = run(*leaves)
    result.square().sum().backward()
    return [result.detach().cpu(), *(None if leaf.grad is None else leaf.grad.cpu() for leaf in leaves)]


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_as_pytorch_has_it(name: str) -> None:
    torch.compiler.reset()
    form = FORMS[name]
    compiled: Any = torch.compile(form, backend="moai", options={"compile": False})
    torch.testing.assert_close(gradients(compiled, "moai"), gradients(form, "cpu"))
