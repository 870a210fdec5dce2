"""Random programs of views and writes: after each step every tensor equals that on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from view_machine import DTYPES, OPS, SHAPES, Step, differences, first, run

pytestmark = [
    pytest.mark.usefixtures("accelerator"),
    pytest.mark.filterwarnings("ignore"),  # PyTorch warns of much that these programs do
]

Firsts = list[tuple[int, int]]

NUMBERS = st.integers(0, 7)
STEPS = st.tuples(st.sampled_from(sorted(OPS)), NUMBERS, NUMBERS, NUMBERS, NUMBERS)
FIRSTS = st.lists(st.tuples(st.integers(0, len(SHAPES) - 1), st.integers(0, len(DTYPES) - 1)), min_size=1, max_size=2)
PROGRAMS = (FIRSTS, st.lists(STEPS, min_size=1, max_size=12))

REFUSED = "cannot be enlarged"
"""What the device alone cannot do, and says so: the program ends there."""


def check(firsts: Firsts, steps: list[Step], accelerator: str) -> None:
    """What the CPU refuses is asked of the strict accelerator alone: workers refuse later, and are compared last."""
    expected = [first(*each, "cpu") for each in firsts]
    found = [first(*each, "moai") for each in firsts]
    for step in steps:
        refused = run(step, expected)
        if refused is not None and accelerator == "workers":
            continue
        said = run(step, found)
        if said is not None and REFUSED in said:
            return
        assert (refused is None) == (said is None), f"{step}: {said!r} where the CPU says {refused!r}"
        if accelerator == "strict":
            assert not differences(expected, found), f"after {step}: {differences(expected, found)}"
    assert not differences(expected, found), f"after all: {differences(expected, found)}"


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(*PROGRAMS)
def test_every_tensor_is_that_of_the_cpu(accelerator: str, firsts: Firsts, steps: list[Step]) -> None:
    check(firsts, steps, accelerator)


@pytest.mark.exact
@settings(max_examples=1_000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(*PROGRAMS)
def test_every_tensor_of_many_programs_is_that_of_the_cpu(accelerator: str, firsts: Firsts, steps: list[Step]) -> None:
    check(firsts, steps, accelerator)


FOUND: list[tuple[Firsts, list[Step]]] = [
    ([(1, 0)], [("write: fill from itself", 0, 0, 0, 0)]),
    ([(6, 3)], [("view: permute", 0, 0, 1, 0), ("copy: view copy", 1, 0, 0, 0)]),
    ([(0, 0), (4, 7)], [("write: out", 0, 1, 0, 0)]),
    ([(0, 2)], [("view: expand dim", 0, 0, 0, 0), ("write: copy shifted", 1, 0, 0, 0)]),
    ([(0, 2)], [("write: foreach", 0, 0, 0, 0)]),
    ([(0, 4)], [("view: unsqueeze", 0, 0, 0, 0), ("write: out", 0, 1, 0, 0)]),
]
"""Programs that hypothesis found to go wrong, shrunk."""


@pytest.mark.parametrize(("firsts", "steps"), FOUND)
def test_what_went_wrong_stays_right(accelerator: str, firsts: Firsts, steps: list[Step]) -> None:
    check(firsts, steps, accelerator)


def test_a_shared_storage_that_is_too_small_is_not_left_behind() -> None:
    x = torch.ones(4, device="moai")
    view = x[1:]
    with pytest.raises(NotImplementedError, match="other tensors share its storage"):
        x.resize_(8)
    del view
    assert x.resize_(8)[:4].tolist() == [1, 1, 1, 1]
    storage: Any = torch.arange(4.0, device="moai").untyped_storage()
    part: Any = torch.empty(0, device="moai")
    part.set_(storage, 2, (2,), (1,))
    assert part.resize_(3)[:2].tolist() == [2, 3]
    assert part.storage_offset() == 2
