"""Special cases of decompositions, compared with plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

Form = Callable[[Tensor, Tensor], Tensor]


def only_a_bias(x: Tensor, bias: Tensor) -> Tensor:
    return functional.conv1d(x.detach().unsqueeze(0), torch.ones(3, 4, 1, device=x.device), bias[:3])


def scattered(x: Tensor, bias: Tensor) -> Tensor:
    mask = torch.tensor([True, False, True, False], device=x.device)
    return x.masked_scatter(mask, bias.repeat(2) * 3)


def apart(x: Tensor, bias: Tensor) -> Tensor:
    """By ops that the gradients of others are made of, called as they are."""
    product = torch.ops.aten.addmm(bias, x, x.t(), beta=0.5, alpha=2)
    gradient = torch.ops.aten.silu_backward(x.detach(), bias.detach().expand(4, 4))
    return product + gradient + x.mean() + x.new_zeros(())


def shuffled(x: Tensor, bias: Tensor) -> Tensor:
    """Every order gives the same sum, and each of its numbers once."""
    order = torch.randperm(4, device=x.device)
    return x[order].sum(0) * bias + order.sort().values


def of_some_labels(x: Tensor, bias: Tensor) -> Tensor:
    """Rows whose targets end at once, early, and not at all; one target is given twice."""
    target = torch.tensor([[-1, 2, 1, 0], [3, 0, -1, 1], [2, 2, 1, 3], [0, 1, 2, 3]], device=x.device)
    each = functional.multilabel_margin_loss(x * bias, target, reduction="none")
    summed = functional.multilabel_margin_loss(bias, target[1], size_average=False)
    return each * summed + nn.MultiLabelMarginLoss()(x, target)


def counted(x: Tensor, bias: Tensor) -> Tensor:
    """By norms that have no gradient."""
    each: list[Tensor] = [x.norm(0), (bias * x).norm(0)]
    return torch.stack(each).sum()


def of_nothing(x: Tensor, bias: Tensor) -> Tensor:
    """Losses that are means over no elements: not a number, with gradients of no elements."""
    losses = (functional.mse_loss, functional.smooth_l1_loss, functional.huber_loss)
    return torch.stack([loss(x[:0], bias.expand(0, 4)).nan_to_num() for loss in losses]).sum() + x * bias


FORMS: Mapping[str, Form] = {
    "products added to nothing": lambda x, bias: torch.baddbmm(bias, x[None], x.t()[None], beta=0, alpha=2),
    "products added to more": lambda x, bias: torch.baddbmm(bias, x[None], x.t()[None], beta=3, alpha=2),
    "a sum with a factor": lambda x, bias: x.add(bias.double(), alpha=0.1) + torch.add(bias.double(), x, alpha=-3),
    "a sum of whole numbers with a factor": lambda x, bias: (
        bias.int().add((16 * x).to(torch.int8), alpha=100) * x + (x > 0).add(bias > 0, alpha=2) * bias
    ),
    "a convolution of whose parts a bias alone is trained": only_a_bias,
    "a convolution without a bias": lambda x, bias: functional.conv1d(x[None], bias.expand(2, 4, 4)),
    "a look-up in a number": lambda x, bias: bias.sum().index_select(
        0, torch.zeros(1, dtype=torch.int64, device=x.device)
    ),
    "a convolution whose parts are all trained": lambda x, bias: functional.conv1d(x[None], x[:3, :, None], bias[:3]),
    "products and means": apart,
    "an order that is drawn": shuffled,
    "a look-up of rows": lambda x, bias: x.index_select(1, torch.tensor([3, 0, 3], device=x.device)),
    "windows that overlap": lambda x, bias: x.unfold(1, 3, 1) * bias[:3],
    "a variance": lambda x, bias: x.var(0, keepdim=True) + torch.var_mean(x + bias, 1, correction=0)[1],
    "the largest and the smallest": lambda x, bias: x.max() * bias - (x + bias).min(),
    "repeated in more dims": lambda x, bias: x.repeat(2, 1, 3) * bias.repeat(3),
    "repeated, and seen as a row": lambda x, bias: (
        (x.t().repeat(2, 1) * 1).view(-1) + x.t().repeat(1, 1).view(16).sum()
    ),
    "scattered from nothing": lambda x, bias: x.masked_scatter(x.detach() > 9, x[:0]) * bias,
    "every other row": lambda x, bias: x[1:4:2] * bias,
    "all but the last columns": lambda x, bias: x[:, :-1] * bias[1:],
    "one row": lambda x, bias: x[-2] * bias[1],
    "scattered by a mask": scattered,
    "a gate": lambda x, bias: functional.silu(x + bias),
    "slopes as in evaluation": lambda x, bias: functional.rrelu(x, training=False) * bias,
    "margins of several labels": of_some_labels,
    "losses of nothing": of_nothing,
    "a count, without gradients": counted,
    "windows of a number": lambda x, bias: bias.sum().unfold(0, 1, 1) * x,
}


def gradients(run: Form, device: str) -> list[Tensor | None]:
    x, bias = ((torch.arange(float(count)).cos() * 2).to(device) for count in (16, 4))
    leaves = [x.view(4, 4).requires_grad_(), bias.requires_grad_()]
    result = run(*leaves)
    result.square().sum().backward()
    return [result.detach().cpu(), *(None if leaf.grad is None else leaf.grad.cpu() for leaf in leaves)]


@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_as_pytorch_has_it(name: str) -> None:
    torch.compiler.reset()
    form = FORMS[name]
    compiled: Any = torch.compile(form, backend="moai", options={"compile": False})
    torch.testing.assert_close(gradients(compiled, "moai"), gradients(form, "cpu"))
