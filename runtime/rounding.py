"""A test mode in which rounding depends on shapes for certain: equal values computed in two shapes differ in last bits.

Kernels sum in an order that depends on the shape, so a product or sum of a part differs in its last bits from that part
of the whole. On small shapes the bits are often equal by chance. Under `rounding_by_shape` they always differ, by a few
last bits, which reveals code that compares such values for equality.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast
from zlib import crc32

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

LAST_BITS = {torch.float64: 2.0**-52, torch.float32: 2.0**-23}
"""Relative change of a result per step: one last bit of its type."""

STEPS = 13
"""Number of different changes."""

_NAMES = """mm bmm addmm baddbmm convolution convolution_backward sum mean var var_mean cumsum prod logsumexp _softmax
    _log_softmax _softmax_backward_data _log_softmax_backward_data native_layer_norm native_layer_norm_backward
    exp log tanh sigmoid erf gelu silu sin cos pow"""

ROUNDING = frozenset(_NAMES.split())


class _Rounding(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        name: str = func.overloadpacket.__name__
        if name not in ROUNDING:
            return results
        shapes = [tuple(each.shape) for each in args if isinstance(each, Tensor)]
        step = crc32(repr((name, shapes)).encode()) % STEPS
        if isinstance(results, Tensor):
            return _moved(results, step)
        return tuple(
            _moved(each, step) if isinstance(each, Tensor) else each for each in cast("Sequence[Any]", results)
        )


def _moved(result: Tensor, step: int) -> Tensor:
    """The result with changed last bits; integral results stay, as they are exact in any order."""
    last = LAST_BITS.get(result.dtype)
    return result if last is None or torch.equal(result, result.round()) else result * (1 + step * last)


@contextmanager
def rounding_by_shape() -> Generator[None]:
    """Make products, sums and transcendental functions round differently for every shape."""
    with _Rounding():
        yield
