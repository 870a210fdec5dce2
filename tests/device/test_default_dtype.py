"""PyTorch's default dtype is that of the script, wherever an op runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

FFT: Any = torch.fft

OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "a range": lambda i: torch.arange(12.0, device=i.device).view(6, 2)[1],
    "a quotient": lambda i: i / 7,
    "a function": torch.sigmoid,
    "a root": torch.sqrt,
    "a power": lambda i: i.pow(0.5),
    "a product": lambda i: i * 0.1,
    "numbers": lambda i: torch.where(i > 3, 0.1, 1 / 3),
    "frequencies": lambda i: FFT.fftfreq(5, device=i.device),
    "a mean": lambda i: (i + 1 / 3).mean(),
}


@pytest.fixture(params=[torch.float64, torch.bfloat16])
def default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_ops_have_the_default_dtype(op: Callable[[Tensor], Tensor], default: torch.dtype) -> None:
    expected, found = op(torch.arange(6)), op(torch.arange(6, device="moai")).cpu()
    assert found.dtype == expected.dtype == default
    assert torch.equal(found, expected)


@pytest.mark.usefixtures("accelerator")
def test_an_op_follows_a_change_of_the_default_dtype() -> None:
    before = torch.arange(3.0, device="moai")
    torch.set_default_dtype(torch.float64)
    try:
        between = torch.arange(3.0, device="moai") / 3
    finally:
        torch.set_default_dtype(torch.float32)
    after = torch.arange(3.0, device="moai")
    assert (before.dtype, between.dtype, after.dtype) == (torch.float32, torch.float64, torch.float32)
    assert between.tolist() == [0.0, 1 / 3, 2 / 3]
    assert after.tolist() == before.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.filterwarnings("ignore")  # of Dynamo, about itself
def test_compiled_ops_have_the_default_dtype(default: torch.dtype) -> None:
    def all_of_them(i: Tensor) -> list[Tensor]:
        return [op(i) for op in OPS.values()]

    compiled = torch.compile(all_of_them, backend="moai", options={"compile": False})
    results = compiled(torch.arange(6).to("moai"))
    for name, found, expected in zip(OPS, results, all_of_them(torch.arange(6)), strict=True):
        assert found.dtype == default
        assert torch.equal(found.cpu(), expected), name
