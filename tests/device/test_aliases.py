"""Views that read a storage as another type: what is written on either side is seen on the other, as on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.usefixtures("accelerator")

MOAI = "moai"


def same(make: Callable[[str], tuple[Tensor, ...]]) -> None:
    """Every tensor that `make` gives must be the CPU's, bit for bit."""
    for expected, found in zip(make("cpu"), make(MOAI), strict=True):
        assert found.device.type == MOAI
        assert (found.dtype, found.shape, found.stride()) == (expected.dtype, expected.shape, expected.stride())
        assert torch.equal(found.cpu(), expected)


def as_real(d: str) -> tuple[Tensor, ...]:
    x = torch.zeros(4, dtype=torch.complex64, device=d)
    real = torch.view_as_real(x)
    real.fill_(1)
    x.mul_(1j)
    return x, real


def imaginary_part(d: str) -> tuple[Tensor, ...]:
    x = torch.zeros(4, dtype=torch.complex64, device=d)
    x[::2].imag.fill_(1)
    x.real[1] = 5
    return x, x.imag


def conjugated(d: str) -> tuple[Tensor, ...]:
    x = torch.full((4,), 1 + 2j, dtype=torch.complex64, device=d)
    x.conj().imag.add_(5)
    return x, x.conj().imag.neg()


def as_complex(d: str) -> tuple[Tensor, ...]:
    x = torch.ones(4, 2, device=d)
    numbers = torch.view_as_complex(x)
    numbers.mul_(1j)
    x[0] = 3
    return x, numbers, numbers.real, numbers.imag


def bits(d: str) -> tuple[Tensor, ...]:
    x = torch.ones(4, device=d)
    words = x.view(torch.int32)
    words[1:].fill_(7)
    halves = words.view(torch.int16)
    halves[0] = 5
    x[3] = 2
    return x, words, halves, x.clone()


def wider_and_narrower(d: str) -> tuple[Tensor, ...]:
    x = torch.arange(16, dtype=torch.uint8, device=d)
    words = x.view(torch.int32)
    words[1:3].view(torch.float32).zero_()
    words.view(torch.uint8)[0] = 9
    return x, words, x[4:12].view(torch.float32), x.view(torch.bool)[:1]


def columns(d: str) -> tuple[Tensor, ...]:
    x = torch.zeros(3, 4, dtype=torch.int64, device=d)
    narrow = x.t().view(torch.int64).t()[1:].view(torch.int16)
    narrow[:, ::3] = 1
    return x, narrow


def gradient(d: str) -> tuple[Tensor, ...]:
    x = torch.arange(12.0, device=d).view(6, 2).requires_grad_()
    y = x * 2
    numbers = torch.view_as_complex(y)
    numbers.mul_(1 + 2j)
    torch.view_as_real(numbers)[::2].mul_(3)
    (numbers.abs() ** 2).sum().backward()
    assert x.grad is not None
    return x.grad, y.detach()


def shared_storage(d: str) -> tuple[Tensor, ...]:
    x = torch.ones(6, device=d)
    words: Any = torch.empty(0, dtype=torch.int32, device=d)
    words.set_(x.untyped_storage(), 2, (2,), (1,))
    words.zero_()
    twin, words_twin = copy.deepcopy((x, words))
    words_twin.fill_(3)
    return x, words, twin, words_twin


def odd_bytes(d: str) -> tuple[Tensor, ...]:
    storage: Any = torch.UntypedStorage([0, 0, 128, 63, 1, 2], device=d)
    number: Any = torch.empty(0, device=d)
    small: Any = torch.empty(0, dtype=torch.uint8, device=d)
    number.set_(storage, 0, (1,)).mul_(2)
    return number, small.set_(storage)


WRITES: list[Callable[[str], tuple[Tensor, ...]]] = [
    as_real,
    imaginary_part,
    conjugated,
    as_complex,
    bits,
    wider_and_narrower,
    columns,
    gradient,
    shared_storage,
    odd_bytes,
]


@pytest.mark.parametrize("make", WRITES)
def test_a_write_is_seen_under_every_type(make: Callable[[str], tuple[Tensor, ...]]) -> None:
    same(make)


def double(x: Tensor) -> Tensor:
    return x * 2


def test_compiled_functions_take_such_views_and_their_split_results_are_seen_so(accelerator: str) -> None:
    if accelerator == "workers":
        compiled: Any = torch.compile(double, backend="moai", options={"dp": 2})
        numbers = torch.view_as_complex(torch.arange(8.0, device=MOAI).view(4, 2)) * 1
        made = compiled(torch.view_as_real(numbers))
        torch.view_as_complex(made).imag.zero_()
        made.view(torch.int32)[3] = 0
        assert made.tolist() == [[0, 0], [4, 0], [8, 0], [0, 0]]


def test_types_that_the_device_does_not_hold_are_refused() -> None:
    x = torch.zeros(4, device=MOAI)
    with pytest.raises(TypeError, match="does not support torch\\.float8_e8m0fnu"):
        x.view(torch.float8_e8m0fnu)


def test_halves_are_seen_as_complex_numbers(accelerator: str) -> None:
    halves = torch.arange(4.0, device=MOAI).half().view(2, 2)
    torch.view_as_complex(halves).imag.fill_(7)
    assert halves.tolist() == [[0, 7], [2, 7]]


NUMBERS: list[Callable[[str], Tensor]] = [
    lambda d: torch.ones(3, device=d) * torch.tensor(1 + 2j),
    lambda d: torch.ones(3, device=d) + 2j,
    lambda d: torch.add(torch.ones(3, device=d) * 1j, torch.ones(3, device=d), alpha=3j),
    lambda d: torch.zeros(4, dtype=torch.complex64, device=d).index_fill_(0, torch.tensor([1], device=d), 2j),
    lambda d: torch.zeros(4, dtype=torch.complex64, device=d)[1:].fill_(1 + 2j),
]


@pytest.mark.parametrize("make", NUMBERS)
def test_complex_numbers_of_the_host_take_part_by_value(make: Callable[[str], Tensor]) -> None:
    same(lambda d: (make(d),))
