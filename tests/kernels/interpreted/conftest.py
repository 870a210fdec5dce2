"""Run by tests/kernels/test_interpreter.py, in a process where Triton interprets kernels: TRITON_INTERPRET=1.

And by `bench/gpu.py`, in one where a GPU runs them.
"""

from __future__ import annotations

from hypothesis import settings

from moaic.runtime.emulation.triton_interpreter import complete

settings.register_profile("quick", max_examples=8, deadline=None, derandomize=True)
settings.register_profile("few", max_examples=4, deadline=None, derandomize=True)
settings.register_profile("glance", max_examples=3, deadline=None, derandomize=True)
settings.register_profile("long", max_examples=100, deadline=None)

complete("cuda")
