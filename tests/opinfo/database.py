"""PyTorch's own database of ops, modules and optimizers, as the sweep needs it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import islice
from typing import Any, Final

import torch

_KINDS: Final = (torch.float32, torch.int64, torch.bool, torch.complex64)
"""The element types of samples, the first that an op takes."""

_DRAWN: Final = 64
"""Samples that are made of an op before some of them are chosen."""


def _table(module: str, name: str) -> Sequence[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(import_module(f"torch.testing._internal.{module}"), name)


@cache
def ops() -> dict[str, Any]:
    """By name, those that the CPU has."""
    return {op.formatted_name: op for op in _table("common_methods_invocations", "op_db") if op.dtypes}


@cache
def modules() -> dict[str, Any]:
    return {info.formatted_name: info for info in _table("common_modules", "module_db")}


@cache
def optimizers() -> dict[str, Any]:
    return {info.optim_cls.__name__: info for info in _table("common_optimizers", "optim_db")}


@dataclass(frozen=True)
class Sample:
    """One call of an op: the arguments, and what makes of its results those that have gradients."""

    input: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    process: Callable[[Any], Any]
    broadcasts: bool
    """Whether the result is larger than the input, so that nothing can be written in place."""


def dtype_of(op: Any) -> torch.dtype:
    return next(kind for kind in (*_KINDS, *op.dtypes) if kind in op.dtypes)


def samples(op: Any, count: int, *, gradients: bool, strided: bool = False) -> Iterator[Sample]:
    """`count` of the op's samples, from the first to the last, the same each time."""
    torch.manual_seed(0)
    drawn: list[Any] = list(islice(op.sample_inputs("cpu", dtype_of(op), requires_grad=gradients), _DRAWN))
    last = len(drawn) - 1
    for index in sorted({round(place * last / max(1, count - 1)) for place in range(count)} if drawn else ()):
        made: Any = drawn[index].noncontiguous() if strided else drawn[index]
        yield Sample(made.input, made.args, made.kwargs, made.output_process_fn_grad, made.broadcasts_input)
