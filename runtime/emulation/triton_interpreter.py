"""Triton's interpreter, completed: functions of device libraries, bounds of memory, and mended faults.

Triton reads TRITON_INTERPRET when it is imported, so the variable must be set before.
"""

from __future__ import annotations

import importlib
import inspect
import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import numpy
from torch import Tensor

from moaic.runtime.codegen.gpu_answers import always
from moaic.runtime.emulation.device_functions import called
from moaic.runtime.emulation.narrow_floats import NarrowFloats
from moaic.runtime.emulation.recording import launched
from moaic.runtime.host.worker_kinds import INTERPRETED

LAUNCHES: Final = Counter[str]()
"""Launches in this process, by the name of the kernel."""


class OutOfBounds(RuntimeError):
    """A kernel has read or written memory that is in none of its operands. Which of them it was in is not known."""


class _Bounds:
    """The memory of the operands of the kernel that runs."""

    def __init__(self) -> None:
        self.beside: tuple[Tensor, ...] = ()
        self.begins = numpy.zeros(0, numpy.uint64)
        self.ends = numpy.zeros(0, numpy.uint64)

    def enter(self, operands: Sequence[object]) -> None:
        tensors = [each for each in (*operands, *self.beside) if isinstance(each, Tensor) and each.numel()]
        self.begins = numpy.array([each.data_ptr() for each in tensors], numpy.uint64)
        self.ends = numpy.array([each.data_ptr() + _extent(each) for each in tensors], numpy.uint64)

    def check(self, addresses: Any, mask: Any, size: int, what: str) -> None:
        """Raises OutOfBounds for an element of `size` bytes of which a part is outside."""
        asked = addresses[numpy.broadcast_to(mask, addresses.shape)].astype(numpy.uint64)[:, None]
        inside = ((asked >= self.begins) & (asked + numpy.uint64(size) <= self.ends)).any(1)
        if not inside.all():
            raise OutOfBounds(f"it {what} {int((~inside).sum())} elements outside of its operands")


def _extent(tensor: Tensor) -> int:
    """Bytes from the first element of a tensor to the end of the last one."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


@contextmanager
def reachable(tensors: Sequence[Tensor]) -> Generator[None]:
    """Within the block kernels may use these tensors, too, whose addresses they are given."""
    before, _BOUNDS.beside = _BOUNDS.beside, (*_BOUNDS.beside, *tensors)
    try:
        yield
    finally:
        _BOUNDS.beside = before


def complete(vendor: str) -> None:
    """Has the interpreter of this process run what Inductor writes for GPUs of a vendor, `cuda` or `hip`.

    Without effect where Triton compiles.
    """
    if os.environ.get(INTERPRETED) != "1":
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Triton warns of what it imports
        interpreter: Any = importlib.import_module("triton.runtime.interpreter")
        language: Any = importlib.import_module("triton.language")
    narrow = NarrowFloats(interpreter, language)
    narrow.mend()
    _complete_builder(interpreter, narrow)
    _complete_launch(interpreter)
    _complete_libraries(interpreter, vendor)
    _patch_once(interpreter, language)


def _complete_builder(interpreter: Any, narrow: NarrowFloats) -> None:
    builder = interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle
    load, store = builder.create_masked_load, builder.create_masked_store
    update, exchange = builder.create_atomic_rmw, builder.create_atomic_cas

    def create_masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        _BOUNDS.check(ptrs.data, mask.data, _bytes(ptrs), "reads")
        return load(self, ptrs, mask, *rest)

    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _BOUNDS.check(ptrs.data, mask.data, _bytes(ptrs), "writes")
        return store(self, ptrs, value, mask, *rest)

    def create_atomic_rmw(self: Any, op: Any, ptr: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _BOUNDS.check(ptr.data, mask.data, _bytes(ptr), "writes")
        if narrow.holds(value):
            return narrow.update(ptr, value, mask, str(op))
        return update(self, op, *(_compact(handle, each) for each in (ptr, value, mask)), *rest)

    def create_atomic_cas(self: Any, ptr: Any, *rest: Any) -> Any:
        _BOUNDS.check(ptr.data, numpy.ones_like(ptr.data, dtype=bool), _bytes(ptr), "writes")
        return exchange(self, ptr, *rest)

    def get_all_ones_value(self: Any, kind: Any) -> Any:
        # Triton 3.7 takes -1 for a number of unsigned types, too, which NumPy 2 refuses.
        return handle(numpy.invert(numpy.zeros(1, interpreter._get_np_dtype(kind))), kind.scalar)

    def create_assert(self: Any, condition: Any, message: str) -> None:
        if not numpy.all(condition.data):
            raise AssertionError(message)

    def create_extern_elementwise(
        self: Any, library: str, path: str, symbol: str, arguments: list[Any], kind: Any, is_pure: bool
    ) -> Any:
        made = called(symbol, [each.data for each in arguments])
        element = kind.scalar
        return handle(made.astype(interpreter._get_np_dtype(element)), element)

    builder.create_masked_load = create_masked_load
    builder.create_masked_store = create_masked_store
    builder.create_atomic_rmw = create_atomic_rmw
    builder.create_atomic_cas = create_atomic_cas
    builder.create_assert = create_assert
    builder.get_all_ones_value = get_all_ones_value
    builder.create_extern_elementwise = create_extern_elementwise


def _bytes(ptrs: Any) -> int:
    return max(1, ptrs.get_element_ty().primitive_bitwidth // 8)


def _compact(handle: Any, value: Any) -> Any:
    return handle(numpy.ascontiguousarray(value.data), value.dtype)


def _complete_launch(interpreter: Any) -> None:
    # Inductor asserts that indices are in range, and has NVIDIA's compiler keep that; sums of integers may wrap.
    asserting = interpreter.interpreter_builder
    asserting.options = replace(asserting.options, debug=True, sanitize_overflow=False)
    executor = interpreter.GridExecutor
    run = executor.__call__
    unrecorded: Any = importlib.import_module("torch.utils._python_dispatch")._disable_current_modes

    def launch(self: Any, *operands: Any, **named: Any) -> None:
        name = _name(self.fn)
        with _ONE_AT_A_TIME, numpy.errstate(all="ignore"):  # what GPUs say nothing of
            LAUNCHES[name] += 1
            _BOUNDS.enter((*operands, *named.values()))
            try:
                # What the interpreter has PyTorch do is the kernel's own work, and not recorded by itself.
                with unrecorded():
                    run(self, *operands, **named)
            except interpreter.InterpreterError as error:
                raise RuntimeError(f"{name}: {error.__cause__ or error}") from error
        launched(partial(launch, self, *operands, **named))

    executor.__call__ = launch


def _name(function: Any) -> str:
    """The name of a kernel: Inductor's own, or of moaic's, which has its file before it."""
    folder, _, file = str(function.__module__).rpartition(".")
    return f"{file}.{function.__name__}" if folder.startswith("moaic") else str(function.__name__)


def _complete_libraries(interpreter: Any, vendor: str) -> None:
    """Kernels find the vendor's functions where a compiler would put them in, and call them as they are."""
    library: Any = importlib.import_module(f"triton.language.extra.{vendor}.libdevice")
    seen: Any = importlib.import_module("triton.language.extra.libdevice")
    for name, member in inspect.getmembers(library, inspect.isfunction):
        if "_semantic" in inspect.signature(member).parameters:
            setattr(seen, name, _meant(member, interpreter.interpreter_semantic))


def _patch_once(interpreter: Any, language: Any) -> None:
    """Replaces the functions of the language for good: Triton does so at each call of a function, for a tenth of a ms.

    Triton 3.6 counts up to arrays of one number, which NumPy 2.4 no longer takes for a number.
    """
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    language.tensor.__index__ = _number
    interpreter._patch_lang = always(SimpleNamespace(restore=always(None)))


def _number(tensor: Any) -> int:
    return tensor.handle.data.item()


def _meant(function: Callable[..., Any], semantic: Any) -> Callable[..., Any]:
    def run(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **{**named, "_semantic": semantic})

    return run


_BOUNDS: Final = _Bounds()

_ONE_AT_A_TIME: Final = threading.Lock()
"""The interpreter knows one kernel, and streams are threads."""
