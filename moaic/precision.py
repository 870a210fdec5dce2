"""The words of the option `precision`, whether the backend is asked for it or the one line."""

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
"""By word, torchao's recipe. In the usual one a scale is of one row or column, and gradients of weights are bfloat16:
the only one in which no product waits for the whole batch, so that all plans are open."""

_WORDS: Final = {**_NARROW, **dict.fromkeys(_FLOAT8, torch.bfloat16)}


def precision_of(value: object, option: str = PRECISION) -> torch.dtype | None:
    """The type that the value of an option asks for; None leaves a model as it is. Raises Diagnostic."""
    word = _word(value)
    if word in _WORDS:
        return _WORDS[word]
    if word in YES:
        return torch.bfloat16
    if word in NO:
        return None
    raise Diagnostic(f"{option}={value} is not known", hint=f"choose True, False, {', '.join(_WORDS)}")


def float8_recipe(value: object) -> str | None:
    """How linear layers compute where the value asks for eight-bit floats: the name of one of torchao's recipes."""
    return _FLOAT8.get(_word(value))


def _word(value: object) -> str:
    return str(value).lower().removeprefix("torch.")
