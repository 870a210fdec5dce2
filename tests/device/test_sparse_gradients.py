"""Modules that ask for sparse gradients train on the device, by dense ones, with one warning."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moaic.device import sparse_gradients

pytestmark = pytest.mark.filterwarnings("ignore:.*dense gradients:UserWarning", "ignore:Sparse invariant:UserWarning")

ROWS, WIDTH = 12, 4


class Gather(nn.Module):
    """A look-up of single elements of a table, as matrix factorizations have it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ROWS, WIDTH))

    def forward(self, index: Tensor) -> Tensor:
        return torch.gather(self.weight, 0, index[:, :WIDTH], sparse_grad=True)


class Weighted(nn.Module):
    """A bag whose rows have weights."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True)

    def forward(self, index: Tensor) -> Tensor:
        return self.bag(index, per_sample_weights=torch.ones(index.shape, device=index.device) / 2)


MODULES: Mapping[str, Callable[[], nn.Module]] = {
    "embedding": lambda: nn.Embedding(ROWS, WIDTH, sparse=True),
    "padding": lambda: nn.Embedding(ROWS, WIDTH, padding_idx=2, sparse=True),
    "sums": lambda: nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True),
    "means": lambda: nn.EmbeddingBag(ROWS, WIDTH, mode="mean", sparse=True),
    "weighted": Weighted,
    "gather": Gather,
}

MESSAGE = "device moai gives dense gradients"


def trained(module: nn.Module, optimizer: Any, device: str, compiled: bool) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of three steps, and the parameters after them."""
    module = copy.deepcopy(module).to(device)
    optimizer = optimizer(module.parameters(), lr=0.1)
    call: Any = torch.compile(module, backend="moai") if compiled else module
    gradients: list[Tensor] = []
    for step in range(3):
        optimizer.zero_grad()
        index = (torch.arange(30).reshape(5, 6) ** 2 + step) % ROWS
        call(index.to(device)).square().sum().backward()
        gradients += [p.grad.cpu().to_dense() for p in module.parameters() if p.grad is not None]
        optimizer.step()
    return gradients, [p.detach().cpu() for p in module.parameters()]


@pytest.mark.parametrize("compiled", [False, True], ids=["op by op", "compiled"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("name", MODULES)
def test_training_is_as_by_sparse_gradients(accelerator: str, name: str, optimizer: Any, compiled: bool) -> None:
    if compiled and accelerator != "workers":
        pytest.skip("programs need workers")
    module = MODULES[name]()
    expected = trained(module, optimizer, "cpu", compiled=False)
    found = trained(module, optimizer, "moai", compiled)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["embedding", "sums", "gather"])
def test_one_warning_says_what_to_write_instead(accelerator: str, name: str) -> None:
    sparse_gradients._warn_once.cache_clear()  # pyright: ignore[reportPrivateUsage]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(MODULES[name](), torch.optim.SGD, "moai", compiled=False)
    said = [warning for warning in caught if MESSAGE in str(warning.message)]
    assert [warning.filename for warning in said] == [__file__]
    assert "leave sparse" in str(said[0].message)
    assert "aten" not in str(said[0].message)


def test_sparse_adam_refuses_the_gradients_by_its_own_words(accelerator: str) -> None:
    with pytest.raises(RuntimeError, match="SparseAdam does not support dense gradients"):
        trained(MODULES["embedding"](), torch.optim.SparseAdam, "moai", compiled=False)
