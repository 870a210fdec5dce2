"""Attention on the device for drawn operands: that of float64, lying as the CPU's; dropout hides what it hides."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.device.attention_cases import (
    TOLERANCES,
    Answer,
    Case,
    answer,
    attention,
    by_definition,
    cases,
    check_close,
    spread,
)

pytestmark = pytest.mark.usefixtures("accelerator")

FEW = settings(max_examples=30, derandomize=True, database=None, deadline=None)
MANY = settings(max_examples=1500, derandomize=True, database=None, deadline=None)

PLAIN = Case(0, torch.float64, ((2, 4, 5, 8),) * 3, ("rows",) * 3)


def strides(tensor: Tensor) -> list[int]:
    """Of dims that have more than one element."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def check(case: Case) -> None:
    tensors = case.tensors()
    found, beside = answer(case, tensors, "moai"), answer(case, tensors, "cpu")
    assert found.error is beside.error
    if found.error:
        return
    expected = answer(case, tensors, "cpu", by_definition)
    for one, other in zip(found.tensors, expected.tensors, strict=True):
        check_close(one, other, TOLERANCES[case.dtype])
    check_alike(found, beside)


def check_alike(found: Answer, beside: Answer) -> None:
    """Types, and how the output lies; gradients of operands without order of columns may lie otherwise."""
    assert [each.dtype for each in found.tensors] == [each.dtype for each in beside.tensors]
    if found.tensors[0].numel():
        assert strides(found.tensors[0]) == strides(beside.tensors[0])


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


# Dropout. Values of a unit matrix beside some numbers show which weights were kept.


def check_dropout(case: Case) -> None:
    query, key, _ = case.shapes
    unit = torch.eye(key[-2], dtype=case.dtype).expand(*key[:-2], -1, -1)
    query, key, value, *mask = case.tensors()
    tensors = [query, key, torch.cat((unit, value), -1), *mask]
    found = answer(case, tensors, "moai")
    kept = found.tensors[0].cpu()[..., : unit.shape[-1]] != 0
    whole = by_definition(query, key, unit, mask[0] if mask else None, 0.0, **case.flags())
    assert not kept[whole == 0].any(), "what is hidden weighs nothing"
    check_share(kept[whole > 1e-4], case.dropout)

    expected = answer(case, tensors, "cpu", partial(by_definition, kept=kept))
    for one, other in zip(found.tensors, expected.tensors, strict=True):
        check_close(one, other, 2 * TOLERANCES[case.dtype])


def check_share(kept: Tensor, dropout: float) -> None:
    """Within six standard deviations."""
    count = kept.numel()
    assert abs(int(kept.sum()) - count * (1 - dropout)) <= 6 * (count * dropout * (1 - dropout)) ** 0.5


def dropping(case: Case, dropout: float) -> Case:
    """`case` with dropout; small weights of short types are not told from those that were dropped."""
    return replace(case, dropout=dropout, dtype=torch.float32 if case.dtype.itemsize == 2 else case.dtype)


DROPPING = st.builds(dropping, cases(), st.sampled_from([0.1, 0.5, 0.9]))


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
