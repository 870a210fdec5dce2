"""Drawn operands for the tests of kernels, their tolerances, and ways to spoil a kernel."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from itertools import count
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SEEDS = st.integers(0, 1 << 30)
NAMES = count()

ROUNDING = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""One unit in the last place, relative: the interpreter cuts bfloat16 off where a GPU rounds it."""


class Source:
    """Tensors of random numbers in random layouts, from one seed: whole, every other element, or with dims swapped.

    They lie on the default device: the CPU, or the GPU of `bench/gpu.py`.
    """

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator(torch.get_default_device()).manual_seed(seed)

    def normal(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        layout = int(torch.randint(4, (), generator=self.random)) if shape else 0
        if layout == 1:
            return self._whole((*shape[:-1], 2 * shape[-1]), dtype)[..., ::2]
        if layout == 2:
            return self._whole((*shape[:-1], shape[-1] + 3), dtype)[..., 1 : 1 + shape[-1]]
        if layout == 3 and len(shape) > 1:
            return self._whole((*shape[:-2], shape[-1], shape[-2]), dtype).transpose(-1, -2)
        return self._whole(shape, dtype)

    def _whole(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.randn(tuple(shape), generator=self.random).to(dtype)


def near(got: Tensor, want: Tensor, units: float, bound: Tensor | float = 0.0) -> None:
    """Within `units` in the last place of its type of the float64 reference, plus the bound on the sum's own error."""
    assert got.shape == want.shape
    if not got.numel():
        return
    allowed = units * ROUNDING[got.dtype] * want.abs() + bound + 1e-7
    error = (got.double() - want).abs()
    # What should be infinite must be, and then there is no error to compare.
    error = torch.where(got.double() == want, 0.0, error)
    assert bool((error <= allowed).all()), f"off by {float((error - allowed).max()):.3g} more than allowed"


def spoiled(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    """The module with one piece of its text replaced, wherever it stands; what comes of it must stay within memory."""
    text = inspect.getsource(module)
    assert old in text, f"`{old}` does not stand in {module.__name__}"
    path = folder / f"spoiled_{next(NAMES)}.py"
    path.write_text(text.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = made
    spec.loader.exec_module(made)
    return made


def must_fail(holds: Callable[[Any, Any], None], module: ModuleType, cases: st.SearchStrategy[Any]) -> None:
    """The property finds the module wanting in a case that is drawn."""

    @settings(
        max_examples=200,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    @given(cases)
    def found(case: Any) -> None:
        holds(module, case)

    # The interpreter's own word for it: arithmetic that warns, where warnings are errors.
    interpreting: type[Exception] = importlib.import_module("triton.runtime.errors").InterpreterError
    with pytest.raises((AssertionError, interpreting)):
        found()


def shapes(most: int = 3, longest: int = 40) -> st.SearchStrategy[tuple[int, ...]]:
    """Of one to `most` dims, odd and even, empty too."""
    sizes = st.one_of(st.integers(1, 9), st.just(0))
    return st.tuples(
        st.lists(sizes, max_size=most - 1).filter(lambda found: prod(found) <= 60), st.integers(1, longest)
    ).map(lambda found: (*found[0], found[1]))
