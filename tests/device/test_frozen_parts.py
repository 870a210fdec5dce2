"""Gradients of modules of which some parameters, or the input, need none: kernels make other results than asked for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection

import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("accelerator")

MODULES: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: nn.BatchNorm2d(3), (4, 3, 5, 5)),
    (lambda: nn.BatchNorm1d(6).eval(), (8, 6)),
    (lambda: nn.InstanceNorm2d(3, affine=True), (4, 3, 5, 5)),
    (lambda: nn.LayerNorm(6), (8, 6)),
    (lambda: nn.GroupNorm(2, 6), (4, 6, 5)),
    (lambda: nn.Conv1d(6, 5, 3), (2, 6, 4)),
    (lambda: nn.Conv3d(3, 4, 2), (2, 3, 4, 4, 4)),
    (lambda: nn.ConvTranspose2d(3, 4, 2), (2, 3, 4, 4)),
]


@pytest.mark.parametrize("frozen", [(), ("weight",), ("bias",), ("weight", "bias")], ids=" ".join)
@pytest.mark.parametrize(("make", "shape"), MODULES)
def test_what_is_not_frozen_has_the_gradient_of_plain_pytorch(
    make: Callable[[], nn.Module], shape: tuple[int, ...], frozen: Collection[str]
) -> None:
    torch.manual_seed(0)
    module, x = make(), torch.randn(shape)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen)
    for reads_input in (True, False) if len(frozen) < 2 else (True,):
        expected, found = (gradients(module, x, device, reads_input) for device in ("cpu", "moai"))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def gradients(module: nn.Module, x: Tensor, device: str, reads_input: bool) -> dict[str, Tensor]:
    there, start = copy.deepcopy(module).to(device), x.to(device).detach().requires_grad_(reads_input)
    there(start).square().sum().backward()
    named = {"input": start, **dict(there.named_parameters())}
    return {name: leaf.grad.cpu() for name, leaf in named.items() if leaf.grad is not None}


def test_results_that_are_given_are_written_though_not_asked_for() -> None:
    def written(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        grad, x, grid = (torch.randn(shape).to(device) for shape in ((1, 2, 2, 2), (1, 2, 3, 3), (1, 2, 2, 2)))
        outs = [torch.zeros_like(x), torch.zeros_like(grid)]
        backward = torch.ops.aten.grid_sampler_2d_backward.out
        backward(grad, x, grid, 0, 0, False, [True, False], out0=outs[0], out1=outs[1])
        return [outs[0].cpu()]

    torch.testing.assert_close(written("moai"), written("cpu"))
