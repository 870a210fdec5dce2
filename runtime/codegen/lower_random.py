"""Random numbers, `moai.fold_key` and `moai.rand`, as torch calls: integer arithmetic of `runtime/rng.py`.

The hash is an op of its own. Written out, each of its steps reads a word twice, and Inductor traces what makes the word
anew for each of them: a function that folds seven keys took 15 s to compile, and takes 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from moaic.ir.graph import Op
from moaic.runtime.dtypes import DTYPES
from moaic.runtime.rng import MULTIPLIERS, SHIFTS, WORD, global_index, mix

PART: Final = 1 << 15
"""Words that a thread hashes at a time: they stay in its cache."""


def _mix_in_parts(words: Tensor) -> Tensor:
    """`mix` on a CPU: op by op, each of its steps on all words would go through memory."""
    if not words.is_contiguous() or words.numel() <= PART:
        return mix(words)
    flat, count = words.view(-1), PART * torch.get_num_threads()
    found = torch.empty_like(flat)
    for start in range(0, len(flat), count):
        found[start : start + count] = mix(flat[start : start + count])
    return found.view(words.shape)


_LIBRARY: Final[Any] = torch.library.Library("moai", "FRAGMENT")
_LIBRARY.define("mix(Tensor word) -> Tensor")
_LIBRARY.impl("mix", mix, "CompositeExplicitAutograd")
_LIBRARY.impl("mix", _mix_in_parts, "CPU")
torch.library.register_fake("moai::mix", torch.empty_like, lib=_LIBRARY)


@cache
def teach_inductor() -> None:
    """Has Inductor compute the hash inside its loops, each step once."""
    from torch._inductor import lowering
    from torch._inductor.virtualized import ops

    inductor: Any = lowering

    def constant(number: int) -> Any:
        return ops.constant(number, torch.int64)

    def step(word: Any, shift: int, multiplier: int) -> Any:
        folded = ops.bitwise_xor(word, ops.bitwise_right_shift(word, constant(shift)))
        return ops.bitwise_and(ops.mul(folded, constant(multiplier)), constant(WORD))

    def mixed(word: Any) -> Any:
        for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
            word = step(word, shift, multiplier)
        return ops.bitwise_xor(word, ops.bitwise_right_shift(word, constant(SHIFTS[-1])))

    register = inductor.register_lowering(torch.ops.moai.mix.default, type_promotion_kind=None)
    register(inductor.make_pointwise(mixed))


def _mixed(word: Tensor) -> Tensor:
    return torch.ops.moai.mix.default(word)


def fold_key(op: Op, operands: Sequence[Any], device: torch.device) -> Tensor:
    """The key i64[2] of one instance of a random op, from the key of the step."""
    instance: Any = op.attrs["instance"]
    key = operands[0]
    words = _mixed(_mixed(key & WORD) ^ ((key >> 32) & WORD))
    return _mixed(words ^ _mixed((words.flip(0) + mix(instance + 1)) & WORD))


def rand(op: Op, operands: Sequence[Any], device: torch.device) -> Tensor:
    """Uniform numbers in [0, 1): each depends on the key and on the element's index in the whole tensor alone."""
    key, *coordinates = operands
    shape = op.results[0].type.shape
    global_shape: Any = op.attrs.get("global_shape", shape)
    splits: Any = op.attrs.get("splits", ())
    index = global_index(shape, tuple(global_shape), splits, coordinates, device)
    # As an op: indexing would make the device the current one, and it may not be here.
    first, second = torch.ops.aten.unbind(key)
    word = _mixed((index + first) & WORD)
    if prod(global_shape) > WORD:
        word = (word + (index >> 32)) & WORD
    word = _mixed(word ^ (second & WORD))
    return ((word >> 8).to(torch.float32) * 2.0**-24).to(DTYPES[op.results[0].type.dtype])
