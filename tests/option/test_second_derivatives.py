"""Derivatives of derivatives with the one line: models run op by op where the gradient of an input is wanted."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from moaic.option.compile_modules import MOST_OPS, wants_gradient_of_inputs

pytestmark = pytest.mark.usefixtures("mode")


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    """Of WGAN-GP: how far the norms of the gradients of `x` are from one."""
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (gradient.square().sum(dim=1).sqrt() - 1).square().mean()


def residual(model: nn.Module, x: Tensor) -> Tensor:
    """Of u_xx + u_t = 0, in coordinates that are put together first."""
    place, time = x[:, :1].detach().requires_grad_(), x[:, 1:].detach().requires_grad_()
    u = model(torch.cat([place, time], dim=1))
    u_x, u_t = torch.autograd.grad(u.sum(), (place, time), create_graph=True)
    (u_xx,) = torch.autograd.grad(u_x.sum(), place, create_graph=True)
    return ((u_xx + u_t) ** 2).mean()


@pytest.mark.parametrize("of", [penalty, residual])
def test_a_loss_of_derivatives_trains_as_on_the_cpu(
    of: Callable[[nn.Module, Tensor], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    found: dict[str, list[float]] = {"cpu": [], "cuda": []}
    for device, losses in found.items():
        model = small().to(device)
        x = torch.linspace(-1, 1, 12).view(6, 2).to(device).requires_grad_()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with caplog.at_level(logging.INFO, logger="moaic"):
            for _ in range(3):
                optimizer.zero_grad()
                loss = of(model, x)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    assert found["cuda"] == pytest.approx(found["cpu"], rel=1e-5)
    assert caplog.text.count("runs op by op where the gradient of an input is wanted") == 1


def test_only_gradients_of_inputs_are_in_the_way() -> None:
    """A discriminator's input depends on a generator's parameters, and is compiled."""
    first, second = small(), nn.Linear(1, 1)
    x = torch.ones(3, 2)
    assert not wants_gradient_of_inputs([x, 1, None, *first.parameters()])
    assert not wants_gradient_of_inputs([first(x), second(first(x))])
    assert wants_gradient_of_inputs([first(x), x.clone().requires_grad_()])
    far = x.clone().requires_grad_()
    assert wants_gradient_of_inputs([second(first(far))])
    for _ in range(MOST_OPS):
        far = far + 1
    assert not wants_gradient_of_inputs([far])


def adapted(model: nn.Module, x: Tensor) -> Tensor:
    """Of MAML: the loss after a step of gradient descent that is differentiated, too."""
    weights: dict[str, Tensor] = {**dict(model.named_parameters())}
    inner = functional_call(model, weights, (x,)).square().mean()
    steps = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
    moved = {name: weight - 0.1 * step for (name, weight), step in zip(weights.items(), steps, strict=True)}
    return functional_call(model, moved, (x,)).square().mean()


def sharpness(model: nn.Module, x: Tensor) -> Tensor:
    """How fast the loss changes with the parameters."""
    loss = model(x).square().mean()
    return sum(
        (each.square().sum() for each in torch.autograd.grad(loss, [*model.parameters()], create_graph=True)),
        torch.zeros((), device=x.device),
    )


def gradients(of: Callable[[nn.Module, Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    of(model, x).backward()
    return [param.grad.cpu() for param in model.parameters() if param.grad is not None]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_parameters_that_a_call_is_given_are_differentiated_twice(caplog: pytest.LogCaptureFixture) -> None:
    model, x = small(), torch.ones(3, 2)
    expected = gradients(adapted, model, x)
    with caplog.at_level(logging.INFO, logger="moaic"):
        found = gradients(adapted, model.cuda(), x.cuda())
    torch.testing.assert_close(found, expected)
    assert caplog.text.count("called with parameters from elsewhere") == 1
    # Nothing is differentiated here.
    caplog.clear()
    with torch.no_grad(), caplog.at_level(logging.INFO, logger="moaic"):
        functional_call(small().cuda(), dict(model.named_parameters()), (x.cuda(),))
    assert "op by op" not in caplog.text


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_an_error_says_how_gradients_of_parameters_are_differentiated() -> None:
    model, x = small(), torch.ones(3, 2)
    expected = gradients(sharpness, model, x)
    model, x = model.cuda(), x.cuda()
    with pytest.raises(RuntimeError, match="double backward") as raised:
        gradients(sharpness, model, x)
    (hint,) = raised.value.__notes__
    assert hint == "hint: run it op by op: model.forward = torch.compiler.disable(model.forward)"
    model.forward = torch.compiler.disable(model.forward)
    torch.testing.assert_close(gradients(sharpness, model, x), expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_chain_of_models_is_compiled(caplog: pytest.LogCaptureFixture) -> None:
    first, second = small().cuda(), nn.Linear(1, 1).cuda()
    with caplog.at_level(logging.INFO, logger="moaic"):
        second(first(torch.ones(3, 2, device="cuda"))).sum().backward()
    assert "op by op" not in caplog.text
