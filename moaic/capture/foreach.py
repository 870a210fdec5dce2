"""Ops on lists of tensors, taken apart into one op per tensor: each tensor then splits by itself.

They come in the compiled steps of optimizers and in clipped gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch

from moaic.device.torch_private import aten_ops

Run = Callable[..., Any]

_PREFIX = "_foreach_"
_OTHERWISE = {"norm": "linalg_vector_norm"}
"""Ops on one tensor that are called otherwise than those on lists."""

_VALUE = {"addcmul", "addcdiv"}
"""Ops that take their fourth argument by name."""


def per_tensor() -> Iterator[tuple[Any, Run]]:
    """Each functional overload that has a counterpart on one tensor, and what it is taken apart by."""
    aten: Any = torch.ops.aten
    # Not dir(aten): that holds what somebody has asked for.
    for name in sorted({op.removeprefix("aten::").partition(".")[0] for op in aten_ops()}):
        single = name.removeprefix(_PREFIX)
        if not name.startswith(_PREFIX) or name.endswith("_"):
            continue
        op = getattr(aten, _OTHERWISE.get(single, single), None)
        packet = getattr(aten, name)
        for overload in packet.overloads() if op is not None else ():
            # A tensor of values is none per tensor.
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
    """Every argument as a list: one that is none is the same for all tensors."""
    lists = [cast("Sequence[Any]", arg) if isinstance(arg, list | tuple) else None for arg in args]
    count = next(len(each) for each in lists if each is not None)
    return [[arg] * count if each is None else each for arg, each in zip(args, lists, strict=True)]
