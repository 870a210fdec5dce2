"""Gradients of what a compiled model returns: exact where a hook asks for them, else a warning says what they lack."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

pytestmark = [
    pytest.mark.usefixtures("mode"),
    # Dynamo's, which looks at every attribute of a tensor that has hooks.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]


class Hidden(nn.Module):
    """Returns what it has computed with, too."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.head(hidden).sum(), hidden


def model_on(device: str) -> tuple[Hidden, Tensor]:
    torch.manual_seed(0)
    return Hidden().to(device), torch.randn(3, 4).to(device)


def retained_in_a_hook(device: str) -> Tensor:
    model, x = model_on(device)
    kept: list[Tensor] = []

    def keep(module: nn.Module, given: object, out: Tensor) -> None:
        out.retain_grad()
        kept.append(out)

    model.body.register_forward_hook(keep)
    model(x)[0].backward()
    (out,) = kept
    assert out.grad is not None
    return out.grad.cpu()


def test_what_a_hook_retains_is_the_gradient(caplog: pytest.LogCaptureFixture) -> None:
    torch.testing.assert_close(retained_in_a_hook("cuda"), retained_in_a_hook("cpu"))
    assert "lacks what" not in caplog.text


def retained(out: Tensor) -> None:
    out.retain_grad()


def half(grad: Tensor) -> Tensor:
    return grad / 2


def halved(out: Tensor) -> None:
    out.register_hook(half)


@pytest.mark.parametrize(("ask", "name"), [(retained, "retain_grad"), (halved, "register_hook")])
def test_what_it_lacks_is_said_once(ask: Callable[[Tensor], None], name: str, caplog: pytest.LogCaptureFixture) -> None:
    model, x = model_on("cuda")
    for _ in range(2):
        _, hidden = model(x)
        ask(hidden)
    (said,) = [each for each in caplog.messages if "lacks what" in each]
    assert said.startswith(f"{name}() on an output of a compiled model")


def test_an_only_output_lacks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).cuda()
    out = model(torch.ones(3, 4, device="cuda"))
    out.retain_grad()
    halved(out)
    out.sum().backward()
    assert out.grad is not None
    assert out.grad.tolist() == [[0.5, 0.5]] * 3
    assert "lacks what" not in caplog.text
