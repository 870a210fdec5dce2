"""Ops that run on the host: operands of every kind, and ops of other libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = [
    pytest.mark.usefixtures("accelerator"),
    pytest.mark.filterwarnings("ignore::moaic.device.cpu_fallback.HostWarning"),
]

LIBRARY = torch.library.Library("tests_of_the_host", "DEF")
LIBRARY.define("halves(Tensor x) -> Tensor[]")
LIBRARY.define("grow(Tensor x) -> Tensor")


def halves(x: Tensor) -> list[Tensor]:
    return [half * 2 for half in x.chunk(2)]


LIBRARY.impl("halves", halves, "CPU")

OPS: Any = torch.ops.tests_of_the_host

DRAWN: list[Callable[[str], Tensor]] = [
    lambda d: torch.normal(torch.zeros(4, device=d), torch.tensor(2.0)),
    lambda d: torch.normal(x := torch.ones(4, device=d), x),
    lambda d: torch.masked_select(torch.arange(3.0, device=d), torch.tensor(data=True)),
]


@pytest.mark.parametrize("draw", DRAWN)
def test_operands_may_be_scalars_of_the_host_and_one_tensor_twice(draw: Callable[[str], Tensor]) -> None:
    torch.manual_seed(2)
    expected = draw("cpu")
    torch.manual_seed(2)
    found = draw("moai")
    assert found.device.type == "moai"
    assert torch.equal(found.cpu(), expected)


def test_a_result_may_be_written_on_the_host() -> None:
    places = torch.empty(0, dtype=torch.int64)
    torch.nonzero(torch.tensor([0.0, 1.0, 2.0], device="moai"), out=places)
    assert places.tolist() == [[1], [2]]


def test_an_op_of_a_library_that_knows_the_cpu_alone() -> None:
    found = OPS.halves(torch.arange(4.0, device="moai"))
    assert [half.device.type for half in found] == ["moai", "moai"]
    assert [half.tolist() for half in found] == [[0, 2], [4, 6]]


def test_an_op_of_a_library_without_a_kernel_says_so() -> None:
    with pytest.raises(NotImplementedError, match="tests_of_the_host::grow"):
        OPS.grow(torch.ones(2, device="moai"))
