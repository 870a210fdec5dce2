"""The optimizer `AdamW` that transformers had before version 5, for scripts that import it from there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

_lists: Final[Any] = torch
"""The `_foreach` functions of torch, whose names are private."""


class AdamW(torch.optim.Optimizer):
    """Adam with weight decay apart from the gradient, as in Loshchilov and Hutter, arXiv:1711.05101, algorithm 2.

    `eps` is added to the square root before its bias is corrected, as in the last line of section 2 of Kingma and Ba,
    arXiv:1412.6980, and the decay comes after the step. `correct_bias=False` leaves the correction out, as BERT did.
    `no_deprecation_warning` has no effect.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
        no_deprecation_warning: bool = False,
    ) -> None:
        if lr < 0 or eps < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"lr={lr} and eps={eps} must not be negative, betas={betas} must be in [0, 1)")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "correct_bias": correct_bias}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters; returns the result of `closure`, which computes the loss again, if it is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            counts = {self._count(parameter) for parameter in parameters}
            for count in counts:
                self._update([p for p in parameters if self.state[p]["step"] == count], count, group)
        return loss

    def _count(self, parameter: torch.Tensor) -> int:
        """Number of the parameter's current step, from 1."""
        state = self.state[parameter]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
        state["step"] += 1
        return state["step"]

    def _update(self, parameters: list[torch.Tensor], count: int, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        gradients = [parameter.grad for parameter in parameters]
        means = [self.state[parameter]["exp_avg"] for parameter in parameters]
        squares = [self.state[parameter]["exp_avg_sq"] for parameter in parameters]
        _lists._foreach_mul_(means, beta1)
        _lists._foreach_add_(means, gradients, alpha=1 - beta1)
        _lists._foreach_mul_(squares, beta2)
        _lists._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
        roots = _lists._foreach_sqrt(squares)
        _lists._foreach_add_(roots, group["eps"])
        rate = group["lr"]
        if group["correct_bias"]:
            rate *= math.sqrt(1 - beta2**count) / (1 - beta1**count)
        _lists._foreach_addcdiv_(parameters, means, roots, value=-rate)
        if group["weight_decay"] > 0:
            _lists._foreach_add_(parameters, parameters, alpha=-group["lr"] * group["weight_decay"])
