"""Models that stay on the host: parameters are sent to the device again after any kind of change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moaic.device.host_tensor_cache import cached_buffer, same_bits
from moaic.runtime.controller import session
from moaic.runtime.controller.buffer import whole
from tests.exact.training import PLANS as OPTIONS
from tests.exact.training import Call, compiled
from tests.loops.compare import Found, same, weights
from tests.loops.tiny import TINY


def by_torch(p: Tensor) -> None:
    with torch.no_grad():
        p.mul_(1.5)


def by_data(p: Tensor) -> None:
    """The version that torch counts stays the same."""
    p.data.add_(0.5)


def by_sign(p: Tensor) -> None:
    """A change that a comparison of numbers would miss."""
    p.data.zero_().neg_()


def by_numpy(p: Tensor) -> None:
    p.detach().numpy()[0] = 7.0


def by_another_storage(p: Tensor) -> None:
    p.data = torch.full_like(p, 3.0)


@pytest.mark.parametrize("change", [by_torch, by_data, by_sign, by_numpy, by_another_storage])
def test_a_change_is_seen(change: Callable[[Tensor], None]) -> None:
    accelerator = session.accelerator()
    p = nn.Parameter(torch.randn(5, 3))
    for _ in range(2):
        assert same_bits(accelerator.download(whole(cached_buffer(accelerator, p))), p.detach())
        change(p)
    assert same_bits(accelerator.download(whole(cached_buffer(accelerator, p))), p.detach())


def test_odd_sizes_are_compared_too() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.bool):
        value = torch.randn(7).to(dtype)
        assert same_bits(value, value.clone())
        assert same_bits(value[1:], value[1:].clone())
        other = value.clone()
        other.view(torch.uint8)[-1] ^= 1
        assert not same_bits(value, other)


def train(model: nn.Module, call: Call) -> Found:
    """Accumulation, a frozen parameter, an evaluation, and weights set by hand."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.get_parameter("embed.weight").requires_grad = False
    said: list[Tensor] = []
    for step in range(2):
        for part in range(2):
            call(**TINY.batch(2 * step + part)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.get_parameter("norm.bias").data.add_(0.1)
        with torch.no_grad():
            said.append(call(**TINY.batch(9)).loss)
    return [*said, *weights(model)]


def test_what_has_not_changed_is_not_sent() -> None:
    torch.compiler.reset()
    host, model = TINY.model(), TINY.model()
    call = compiled(model, OPTIONS["use"], compile=False)
    same(train(model, call), train(host, host))
    accelerator: Any = session.accelerator()
    with torch.no_grad():
        call(**TINY.batch(9))
        before = accelerator.stats().commands
        call(**TINY.batch(9))
    assert accelerator.stats().commands - before < len(list(model.parameters()))
