"""Compiled attention of drawn operands: float64's values, the CPU's strides, dropout that hides its share."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from tests.device.attention_cases import DROPPING, Attend, Case, attention, cases, check, check_dropout

pytestmark = pytest.mark.filterwarnings("ignore")  # of Dynamo, about itself

FEW = settings(max_examples=4, derandomize=True, database=None, deadline=None)
MANY = settings(max_examples=600, derandomize=True, database=None, deadline=None)


def compiled() -> Attend:
    torch.compiler.reset()
    return torch.compile(attention, backend="moai", fullgraph=True, options={"compile": False})


@FEW
@given(cases())
def test_compiled_attention_is_that_of_the_definition(case: Case) -> None:
    check(case, compiled())


@FEW
@given(DROPPING)
def test_compiled_dropout_keeps_what_it_shows(case: Case) -> None:
    check_dropout(case, compiled())


@pytest.mark.exact
@pytest.mark.timeout(7200)
@MANY
@given(cases())
def test_compiled_attention_is_that_of_the_definition_in_many_cases(case: Case) -> None:
    check(case, compiled())


@pytest.mark.exact
@pytest.mark.timeout(7200)
@MANY
@given(DROPPING)
def test_compiled_dropout_keeps_what_it_shows_in_many_cases(case: Case) -> None:
    check_dropout(case, compiled())
