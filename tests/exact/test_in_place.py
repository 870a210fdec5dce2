"""In-place writes after a forward change neither its results nor its gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class Writes(nn.Module):
    """Two graphs, the second of which overwrites the first one's input."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.one(x.clone())
        torch._dynamo.graph_break()  # pyright: ignore[reportPrivateUsage]
        before = x.clone()
        x.add_(1)
        return self.two(h), before.view(-1)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it between two graphs
@pytest.mark.parametrize("early", [False, True], ids=["lazy", "read first"])
def test_what_is_written_in_place_does_not_reach_back(early: bool) -> None:
    torch.manual_seed(0)
    reference = Writes()
    model: Any = copy.deepcopy(reference)
    model.to("moai")
    x = torch.randn(4, 4)
    ours, theirs = x.to("moai"), x.clone()
    found = torch.compile(model, backend="moai", options={"compile": False})(ours)
    wanted = reference(theirs)
    if early:
        assert torch.equal(found[1].cpu(), wanted[1])
    found[0].sum().backward()
    wanted[0].sum().backward()
    assert torch.equal(found[1].cpu(), wanted[1])
    torch.testing.assert_close(ours.cpu(), theirs)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.cpu(), reference.get_parameter(name).grad)
