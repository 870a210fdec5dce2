"""Attention on the device for drawn operands: float64's values, the CPU's strides, dropout that hides its share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.device.attention_cases import (
    DROPPING,
    TOLERANCES,
    Case,
    answer,
    attention,
    cases,
    check,
    check_close,
    check_dropout,
    spread,
)

pytestmark = pytest.mark.usefixtures("accelerator")

FEW = settings(max_examples=30, derandomize=True, database=None, deadline=None)
MANY = settings(max_examples=1500, derandomize=True, database=None, deadline=None)

PLAIN = Case(0, torch.float64, ((2, 4, 5, 8),) * 3, ("rows",) * 3)


@FEW
@given(cases())
def test_attention_is_that_of_the_definition(case: Case) -> None:
    check(case)


@pytest.mark.exact
@pytest.mark.timeout(7200)
@MANY
@given(cases())
def test_attention_is_that_of_the_definition_in_many_cases(case: Case) -> None:
    check(case)


@FEW
@given(spread())
def test_operands_are_broadcast_and_may_be_empty(case: Case) -> None:
    check_beside_the_cpu(case)


@pytest.mark.exact
@pytest.mark.timeout(7200)
@MANY
@given(spread())
def test_operands_are_broadcast_and_may_be_empty_in_many_cases(case: Case) -> None:
    check_beside_the_cpu(case)


def check_beside_the_cpu(case: Case) -> None:
    tensors = case.tensors()
    with sdpa_kernel(SDPBackend.MATH):
        beside = answer(case, tensors, "cpu")
    found = answer(case, tensors, "moai")
    assert found.error is beside.error
    for one, other in zip(found.tensors, beside.tensors, strict=True):
        check_close(one, other, TOLERANCES[case.dtype])


@pytest.mark.parametrize("mask", ["bool", "numbers", "hiding numbers"])
@pytest.mark.parametrize("size", [(5, 5), (2, 1, 1, 5), (1, 4, 5, 1)])
def test_a_mask_and_the_causal_flag_hide_together(mask: str, size: tuple[int, ...]) -> None:
    check(replace(PLAIN, mask=mask, mask_shape=size, is_causal=True))


REFUSED: dict[str, tuple[list[Tensor], Tensor | None, dict[str, Any]]] = {
    "a mask of whole numbers": (PLAIN.tensors(), torch.ones(5, 5, dtype=torch.int64), {}),
    "a mask of another size": (PLAIN.tensors(), torch.ones(5, 3, dtype=torch.bool), {}),
    "a mask of one dim": (PLAIN.tensors(), torch.ones(5, dtype=torch.bool), {}),
    "two types": ([PLAIN.tensors()[0], *[x.float() for x in PLAIN.tensors()[1:]]], None, {}),
    "one dim": ([x[0, 0, 0] for x in PLAIN.tensors()], None, {}),
    "heads that share no keys evenly": (
        [x[:, :n] for x, n in zip(PLAIN.tensors(), (4, 3, 3), strict=True)],
        None,
        {"enable_gqa": True},
    ),
    "heads without a flag that they share": (
        [x[:, :n] for x, n in zip(PLAIN.tensors(), (4, 2, 2), strict=True)],
        None,
        {},
    ),
    "a mask and a flag in three dims": (
        [x[0] for x in PLAIN.tensors()],
        torch.ones(5, 5, dtype=torch.bool),
        {"is_causal": True},
    ),
    "whole numbers": ([x.long() for x in PLAIN.tensors()], None, {}),
    "more than all dropped": (PLAIN.tensors(), None, {"dropout_p": 1.5}),
}
"""Operands, a mask and flags."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_cpu_refuses_is_refused(name: str) -> None:
    operands, mask, flags = REFUSED[name]
    for device in ("cpu", "moai"):
        moved = [x.to(device) for x in operands]
        with pytest.raises((RuntimeError, IndexError)):
            attention(*moved, None if mask is None else mask.to(device), **flags).sum().item()


def test_operands_on_two_devices_are_refused() -> None:
    query, key, value = PLAIN.tensors()
    with pytest.raises(RuntimeError, match="device"):
        attention(query.to("moai"), key, value)
    with pytest.raises(RuntimeError, match="device"):
        attention(*(x.to("moai") for x in (query, key, value)), torch.ones(5, 5, dtype=torch.bool))


@FEW
@given(DROPPING)
def test_dropout_keeps_what_it_shows_and_hides_what_is_hidden(case: Case) -> None:
    check_dropout(case)


@pytest.mark.exact
@pytest.mark.timeout(7200)
@MANY
@given(DROPPING)
def test_dropout_keeps_what_it_shows_and_hides_what_is_hidden_in_many_cases(case: Case) -> None:
    check_dropout(case)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_all_may_be_dropped(dtype: torch.dtype) -> None:
    found = answer(replace(PLAIN, dtype=dtype, dropout=1.0), replace(PLAIN, dtype=dtype).tensors(), "moai")
    assert not any(each.cpu().any() for each in found.tensors)
