"""The same behaviour in plain PyTorch on the host and on the workers, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor, nn

from tests.exact.training import Call, check

PLANS = ("tp2", "use", "dp2", "pp2")
"""How the model is split while people do what they do; names in `tests.exact.training.PLANS`."""

Found = Sequence[Tensor]

Behaviour = Callable[[nn.Module, Call], Found]
"""Does something with a model and how it is called, and gives what came of it."""


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().cpu() for p in model.parameters()]


def grads(model: nn.Module) -> list[Tensor]:
    found = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def same(found: Found, expected: Found, tolerance: float = 1e-5) -> None:
    check(numbered(found), numbered(expected), tolerance)


def numbered(tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    return {f"result {index}, {list(tensor.shape)},": tensor for index, tensor in enumerate(tensors)}
