"""Decompositions of ops on lists of tensors into one op per tensor, so that each tensor has its own sharding.

Compiled optimizer steps and gradient clipping have such ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch

from moaic.device.torch_private import aten_ops

Run = Callable[..., Any]

_PREFIX = "_foreach_"
_RENAMED = {"norm": "linalg_vector_norm"}
"""Ops on one tensor whose name is not that of the op on a list."""

_VALUE = {"addcmul", "addcdiv"}
"""Ops that take their fourth argument by name."""


def per_tensor() -> Iterator[tuple[Any, Run]]:
    """Each functional overload that has a counterpart on one tensor, and its decomposition."""
    aten: Any = torch.ops.aten
    # Not dir(aten), which lists only ops that were accessed before.
    for name in sorted({op.removeprefix("aten::").partition(".")[0] for op in aten_ops()}):
        single = name.removeprefix(_PREFIX)
        if not name.startswith(_PREFIX) or name.endswith("_"):
            continue
        op = getattr(aten, _RENAMED.get(single, single), None)
        packet = getattr(aten, name)
        for overload in packet.overloads() if op is not None else ():
            # One tensor that holds all values cannot be passed to each op as its value.
            if not overload.endswith("out") and (overload != "Tensor" or single not in _VALUE):
                yield getattr(packet, overload), _each(op, single in _VALUE)


def _each(op: Any, has_value: bool) -> Run:
    def run(*args: Any, **kwargs: Any) -> list[Any]:
        results: list[Any] = []
        for mine in zip(*_aligned(args), strict=True):
            given, value = (mine[:3], mine[3:]) if has_value else (mine, ())
            results.append(op(*given, **kwargs, **dict(zip(("value",), value, strict=False))))
        return results

    return run


def _aligned(args: Sequence[Any]) -> list[Sequence[Any]]:
    """Every argument as a list: an argument that is not one is repeated for each tensor."""
    lists = [cast("Sequence[Any]", arg) if isinstance(arg, list | tuple) else None for arg in args]
    count = next(len(each) for each in lists if each is not None)
    return [[arg] * count if each is None else each for arg, each in zip(args, lists, strict=True)]
