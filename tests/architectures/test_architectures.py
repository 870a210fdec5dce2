"""A sample of `make architectures`: mixing by Fourier transforms.

The long run includes rotary embedding of strided halves, and architectures that raised errors before: views at repeated
calls, positions interpolated from images.
"""

from __future__ import annotations

import pytest
import torch

from tests.architectures.prove import found_of
from tests.architectures.sweep import page

# Raised by PyTorch's own modules and by the models when they are imported or used.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning"),
]


LONG = ("causal/gptj", "vision/idefics2", "vision/glm46v")


@pytest.mark.parametrize("name", ["masked/fnet", *(pytest.param(each, marks=pytest.mark.exact) for each in LONG)])
def test_an_architecture_is_equal_under_every_plan(name: str) -> None:
    kind, family = name.split("/")
    found = {tried: (verdict, why) for tried, verdict, why in found_of(kind, family)}
    torch.compiler.reset()
    assert set(found) == {"capture", "graphs", "auto", "micro_batches=2", "dp=2", "tp=2", "cp=2", "pp=2"}, found
    assert {verdict for verdict, _ in found.values()} == {"equal"}, found


def test_the_page_counts_and_names_what_is_not_equal() -> None:
    found = {
        "causal/one": {"capture": ("equal", ""), "dp=2": ("equal", "dp=2")},
        "image/two": {"capture": ("equal", ""), "dp=2": ("wrong", "grad a | b is off")},
        "image/three": {"build": ("not built", "no")},
    }
    text = page(found)
    assert "| `dp=2` | 1 | 0 | 1 | 0 |" in text
    assert "| image/two | `dp=2` | wrong | grad a / b is off |" in text
    assert "image/three (no)" in text
