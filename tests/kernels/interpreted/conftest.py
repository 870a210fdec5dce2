"""Run by tests/kernels/test_interpreter.py, in a process where Triton interprets kernels: TRITON_INTERPRET=1.

And by `bench/gpu.py`, in one where a GPU runs them.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from hypothesis import settings

settings.register_profile("quick", max_examples=8, deadline=None, derandomize=True)
settings.register_profile("few", max_examples=4, deadline=None, derandomize=True)
settings.register_profile("glance", max_examples=3, deadline=None, derandomize=True)
settings.register_profile("long", max_examples=100, deadline=None)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Triton warns of what it imports
    tl: Any = importlib.import_module("triton.language")
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")

BUILDER = interpreter.InterpreterBuilder
DOT = BUILDER.create_dot


def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    """Triton 3.7's interpreter multiplies the bits of bfloat16 as if they were integers: here they become float32."""
    wide = [self.cast_impl(each, tl.float32) if each.dtype.scalar == tl.bfloat16 else each for each in (a, b)]
    return DOT(self, *wide, *rest)


BUILDER.create_dot = dot

PATCH_TENSOR = interpreter._patch_lang_tensor


def patch_tensor(tensor: Any, scope: Any) -> None:
    """Triton 3.6's interpreter counts up to arrays of one number, which NumPy 2.4 no longer takes for a number."""
    PATCH_TENSOR(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())  # pyright: ignore[reportUnknownLambdaType]


interpreter._patch_lang_tensor = patch_tensor
