"""Hooks on gradients of a compiled model's outputs: a warning, as they see less than those of plain PyTorch.

The outputs of a compiled graph do not depend on each other. So the gradient of one is what comes from outside of the
model, without what the model itself has computed from it, such as the loss from a hidden state.
"""

from __future__ import annotations

import logging
from functools import wraps
from typing import Any, Final

import torch

from moaic.device import torch_private

LOGGER: Final = logging.getLogger("moaic")


def warns(real: Any) -> Any:
    """`Tensor.retain_grad` or `Tensor.register_hook`, which says once what a compiled model's outputs lack."""
    told: list[str] = []

    @wraps(real)
    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not told and torch_private.is_among_compiled_outputs(self):
            told.append(real.__name__)
            LOGGER.warning(
                "%s() on an output of a compiled model: its gradient lacks what the model itself computes from it. "
                "Call it where the model makes the tensor, such as in a forward hook, or wrap the model's forward in "
                "torch.compiler.disable",
                real.__name__,
            )
        return real(self, *args, **kwargs)

    return call
