"""Check element types that CPU kernels refuse but meta kernels accept, before an op is sent to CPU workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from moaic.runtime.controller import session
from moaic.runtime.host.gpus import CPU
from moaic.runtime.protocol.aten_schema import Signature

Trial = Callable[[Sequence[Any], tuple[Any, ...], dict[str, Any]], None]


def trial_of(signature: Signature) -> Trial:
    """A check that runs an elementwise op on single elements, once per combination of element types.

    It raises the NotImplementedError of the CPU kernel. GPUs have other kernels, and ops that are not elementwise
    restrict shapes and values too: for both the workers raise.
    """
    accepted: set[tuple[Any, ...]] = set()

    def check(key: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        types = tuple(each for each in key if isinstance(each, torch.dtype | type))
        if types not in accepted and set(session.SESSION.flavor().devices) == {CPU}:
            _attempt(signature, args, kwargs)
            accepted.add(types)

    return check if "pointwise" in signature.tags else _unchecked


def _unchecked(key: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    return None


def _attempt(signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        signature.overload(*map(_single, args), **{name: _single(value) for name, value in kwargs.items()})
    except NotImplementedError:
        raise
    except RuntimeError:
        return  # about the values, which are not those of the operands


def _single(value: Any) -> Any:
    """A tensor of the same type with at most one element: 1, a valid divisor."""
    if isinstance(value, torch.Tensor):
        return torch.ones([min(size, 1) for size in value.shape], dtype=value.dtype, device="cpu")
    return [_single(each) for each in value] if isinstance(value, list) else value  # pyright: ignore[reportUnknownVariableType]
