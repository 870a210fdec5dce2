"""Moves of modules keep the parameter objects, so tied weights stay tied and optimizers keep their parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from moaic.device import torch_private
from moaic.device.identity import is_moai

Convert = Callable[[torch.Tensor], torch.Tensor]


class Move:
    """The function that `Module._apply` applies to each tensor; it swaps the C++ tensor of a parameter that moves.

    torch would replace the `Parameter` by a new one in each module, since it does not know that a host tensor can
    become a tensor of the device.
    """

    def __init__(self, convert: Convert) -> None:
        self.convert = convert

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        # A parameter that is moved in inference mode is the same object, and may be trained later.
        if not torch.is_inference_mode_enabled() or is_lazy(tensor) or tensor.is_inference():
            return self._moved(tensor)
        with torch.inference_mode(mode=False):
            return self._moved(tensor)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        moved = self.convert(tensor)
        if moved is tensor or tensor.device == moved.device or not isinstance(tensor, torch.nn.Parameter):
            return moved
        if not (is_moai(tensor.device) or is_moai(moved.device)):
            return moved
        self._exchange(tensor, moved)
        return tensor

    def _exchange(self, parameter: torch.nn.Parameter, moved: torch.Tensor) -> None:
        gradient = parameter.grad
        fresh = moved.detach().requires_grad_(parameter.requires_grad)
        if gradient is not None:
            fresh.grad = self.convert(gradient).detach()
        if parameter.requires_grad and not is_lazy(parameter) and not parameter.is_inference():
            _forbid_backward(parameter)
        hooks = torch_private.hooks_of(parameter)
        torch_private.swap_tensor_impl(parameter, fresh)
        torch_private.set_hooks(parameter, hooks)


def _forbid_backward(parameter: torch.nn.Parameter) -> None:
    """Raise in the backward of a graph recorded before the move: it would accumulate into an orphaned gradient."""
    torch_private.accumulate_node(parameter).register_prehook(_moved_since)


def _moved_since(*_: Any) -> None:
    raise RuntimeError(
        "backward() reached a parameter that has been moved to or from device moai since its forward: "
        "run the forward again after model.to(...)"
    )
