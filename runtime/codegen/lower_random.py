"""Random numbers, `moai.fold_key` and `moai.rand`, as torch calls: integer arithmetic of `runtime/rng.py`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from moaic.ir.graph import Op
from moaic.runtime.dtypes import DTYPES
from moaic.runtime.rng import WORD, global_index, mix


def fold_key(op: Op, operands: Sequence[Any], device: torch.device) -> Tensor:
    """The key i64[2] of one instance of a random op, from the key of the step."""
    instance: Any = op.attrs["instance"]
    key = operands[0]
    words = mix(mix(key & WORD) ^ ((key >> 32) & WORD))
    return mix(words ^ mix((words.flip(0) + mix(instance + 1)) & WORD))


def rand(op: Op, operands: Sequence[Any], device: torch.device) -> Tensor:
    """Uniform numbers in [0, 1): each depends on the key and on the element's index in the whole tensor alone."""
    key, *coordinates = operands
    shape = op.results[0].type.shape
    global_shape: Any = op.attrs.get("global_shape", shape)
    splits: Any = op.attrs.get("splits", ())
    index = global_index(shape, tuple(global_shape), splits, coordinates, device)
    word = mix(((index & WORD) + key[0]) & WORD)
    if prod(global_shape) > WORD:
        word = (word + (index >> 32)) & WORD
    word = mix(word ^ (key[1] & WORD))
    return ((word >> 8).to(torch.float32) * 2.0**-24).to(DTYPES[op.results[0].type.dtype])
