"""The distance of results: a NaN neither hides a difference nor counts as one."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch

from moaic.check.distance import distance, largest
from moaic.check.proof import compared
from moaic.ir.parser import parse
from moaic.passes.config import Config

STEP = """// moai 1
func @step(%x: f64[2] input "x", %w: f64[2] param "w", %t: f64[2] tangent "y")
    -> (f64[2] output "mask", f64[2] grad "w") {
  return %x, %t
}
"""


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        ([1.0, 2.0], [1.0, 4.0], 0.5),
        ([-inf, 1.0], [-inf, 1.0], 0.0),
        ([-inf, 1.0], [-inf, 2.0], 0.5),
        ([nan, 1.0], [nan, 1.0], 0.0),
        ([nan, 1.0], [0.0, 1.0], inf),
        ([0.0, 1.0], [inf, 1.0], inf),
        ([inf, 1.0], [-inf, 1.0], inf),
        ([1 + 2j, 0], [1 + 1j, 0], 1.0),
        ([], [], 0.0),
        ([True, False], [True, True], 1.0),
    ],
)
def test_the_largest_difference(one: list[complex], other: list[complex], apart: float) -> None:
    assert distance(torch.tensor(one), torch.tensor(other)) == apart


def test_the_largest_element_is_finite() -> None:
    assert largest(torch.tensor([-inf, -3.0, nan])) == 3
    assert largest(torch.tensor([inf])) == 0
    assert distance(torch.tensor([1e-9]), torch.tensor([2e-9]), floor=1.0) == pytest.approx(1e-9)


def test_an_infinite_output_hides_no_wrong_gradient() -> None:
    """A mask of `-inf` is a result like any other."""
    main = parse(STEP).main
    mask, right, wrong = torch.tensor([-inf, 0.0]), torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])
    assert compared(Config(), main, [mask, right], [mask, right], 1e-9).reason == ""
    assert compared(Config(), main, [mask, wrong], [mask, right], 1e-9).reason == "grad w is off by 5.0e-01"
