"""Values that are given out only if all is well: `moai::checked(value, said, message)`.

An op of its own, because kernels of Inductor end the process where one of their assertions fails on a CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("moai::checked", mutates_args=())
def checked(value: Tensor, said: Tensor, message: str) -> Tensor:
    """`value` where all of `said` is true, or where all of it are codes of success that the routine `message` gave."""
    if said.dtype != torch.bool:
        torch.ops.aten._linalg_check_errors(said, message, is_matrix=said.dim() == 0)
    elif not said.all().item():
        raise RuntimeError(message)
    return value.clone()


@checked.register_fake
def _like_value(value: Tensor, said: Tensor, message: str) -> Tensor:
    return torch.empty_like(value)
