"""Fixes for bugs of Triton's interpreter, for tests and benchmarks that run kernels in it."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Triton warns of what it imports
    tl: Any = importlib.import_module("triton.language")
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")

DOT = interpreter.InterpreterBuilder.create_dot
PATCH_TENSOR = interpreter._patch_lang_tensor


def mend_interpreter() -> None:
    """From now on, in this process."""
    interpreter.InterpreterBuilder.create_dot = _dot
    interpreter._patch_lang_tensor = _patch_tensor


def _dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    """Triton 3.7's interpreter multiplies the bits of bfloat16 as if they were integers: here they become float32."""
    wide = [self.cast_impl(each, tl.float32) if each.dtype.scalar == tl.bfloat16 else each for each in (a, b)]
    return DOT(self, *wide, *rest)


def _patch_tensor(tensor: Any, scope: Any) -> None:
    """Triton 3.6's interpreter counts up to arrays of one number, which NumPy 2.4 no longer takes for a number."""
    PATCH_TENSOR(tensor, scope)
    scope.set_attr(tensor, "__index__", _number)


def _number(tensor: Any) -> int:
    return tensor.handle.data.item()
