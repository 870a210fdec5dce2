"""Mistakes with tensors of the device are said at once, in PyTorch's words where it has some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from moaic.device.handles import view_of

pytestmark = pytest.mark.usefixtures("accelerator")

MOAI = "moai"

TORCH: Any = torch


def halves(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float16, device=MOAI)


MISTAKES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: torch.ones(2, 3, device=MOAI) @ torch.ones(2, 3, device=MOAI), RuntimeError, "same reduction dim"),
    (lambda: torch.ones(3, device=MOAI)[5], IndexError, "out of bounds"),
    (lambda: torch.ones(3, device=MOAI).view(7), RuntimeError, "invalid for input of size 3"),
    (lambda: torch.ones(3, device="moai:1"), RuntimeError, "there is one device moai"),
    (lambda: torch.arange(3, device="moai:1"), RuntimeError, "there is one device moai"),
    (lambda: torch.ones(3).to("moai:2"), RuntimeError, "there is one device moai"),
    (
        lambda: torch.ones(3, device=MOAI, dtype=torch.float8_e8m0fnu),
        TypeError,
        "does not support torch.float8_e8m0fnu",
    ),
    (lambda: torch.ones(3, device=MOAI).to_sparse(), NotImplementedError, "dense tensors only"),
    (
        lambda: torch.empty(3, device=MOAI, layout=TORCH.jagged),
        NotImplementedError,
        "dense tensors only, not torch.jagged",
    ),
    (
        lambda: TORCH.ones(3, device=MOAI).to_mkldnn(),
        NotImplementedError,
        "to_mkldnn.* is not available on device moai",
    ),
    (lambda: torch.ones(2, device=MOAI).fill_(torch.ones(2, device=MOAI)), RuntimeError, "only supports 0-dimension"),
    (lambda: TORCH.ones(2, dtype=torch.int64, device=MOAI).pow(-1).tolist(), RuntimeError, "negative integer powers"),
    (lambda: torch.ones(3, device="meta").pin_memory(), RuntimeError, "cannot pin"),
    (lambda: functional.linear(halves(4, 6), torch.ones(3, 6, device=MOAI)).cpu(), RuntimeError, "same dtype"),
    (
        lambda: functional.linear(halves(4, 6), halves(3, 6), torch.ones(3, device=MOAI)).cpu(),
        RuntimeError,
        "same dtype",
    ),
    (lambda: torch.ones(4, 6, device=MOAI).mv(halves(6)).cpu(), RuntimeError, "same dtype"),
    (
        lambda: functional.grid_sample(
            torch.ones(1, 2, 4, 4, device=MOAI), torch.ones(1, 3, 3, 3, device=MOAI), align_corners=False
        ),
        RuntimeError,
        "last dimension",
    ),
    (lambda: torch.ones(3, dtype=torch.int64, device=MOAI).add_(1.5), RuntimeError, "romotion"),
    (lambda: torch.empty(-1, device=MOAI), RuntimeError, "negative dimension"),
    (lambda: torch.ones(3, device=MOAI, pin_memory=True), RuntimeError, "only tensors on the cpu can be pinned"),
    (lambda: torch.ones(3, device=MOAI).pin_memory(), RuntimeError, "only tensors on the cpu"),
    (lambda: torch.Generator(device=MOAI), NotImplementedError, "no generator of its own"),
    (lambda: view_of(torch.ones(3)), TypeError, "expected a tensor on device moai"),
]


@pytest.mark.parametrize(("mistake", "kind", "message"), MISTAKES)
def test_mistakes_are_said_at_once(mistake: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        mistake()
