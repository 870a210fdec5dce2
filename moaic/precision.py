"""Values of the option `precision`, of the backend and of `enable_advanced_parallelization`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from moaic.ir.errors import Diagnostic
from moaic.runtime.host.env_flags import NO, YES

PRECISION: Final = "precision"

_NARROW: Final[Mapping[str, torch.dtype]] = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}

_FLOAT8: Final[Mapping[str, str]] = {
    "float8": "rowwise_with_gw_hp",
    "fp8": "rowwise_with_gw_hp",
    "float8_rowwise": "rowwise",
    "float8_tensorwise": "tensorwise",
}
"""torchao's recipe by value. The default scales rows or columns and keeps gradients of weights in bfloat16: the only
recipe in which no product depends on the whole batch, so that every plan is possible."""

_WORDS: Final = {**_NARROW, **dict.fromkeys(_FLOAT8, torch.bfloat16)}


def precision_of(value: object, option: str = PRECISION) -> torch.dtype | None:
    """The compute type of an option's value; None leaves a model unchanged. Raises Diagnostic."""
    word = _word(value)
    if word in _WORDS:
        return _WORDS[word]
    if word in YES:
        return torch.bfloat16
    if word in NO:
        return None
    raise Diagnostic(f"invalid value `{value}` for {option}", hint=f"choose True, False, {', '.join(_WORDS)}")


def float8_recipe(value: object) -> str | None:
    """The name of torchao's recipe for linear layers if the value asks for eight-bit floats; else None."""
    return _FLOAT8.get(_word(value))


def _word(value: object) -> str:
    return str(value).lower().removeprefix("torch.")
