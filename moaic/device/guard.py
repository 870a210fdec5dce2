"""The device guard, which holds back exceptions that hooks raise in backward.

When a hook raises, PyTorch unwinds the engine while Python's error is still set, and calls the guard's `type_`. A call
with an error set fails with another error, and an error in the guard's destructor aborts the process. So the guard
holds the error, and the patched entry of the engine raises it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Final, cast

from moaic.device import torch_private
from moaic.interrupts import uninterrupted

_HELD: Final = threading.local()
"""`error`: the exception held on this thread."""

_PYTHON: Final = ctypes.PyDLL(None)
_PYTHON.PyErr_Fetch.restype = None
_SLOTS: Final = (ctypes.c_void_p * 3)()
"""The error's type, value and traceback, each an owned reference."""

_ADDRESSES: Final = tuple(ctypes.byref(_SLOTS, index * ctypes.sizeof(ctypes.c_void_p)) for index in range(3))


class Guard(torch_private.DEVICE_GUARD):
    """Tells PyTorch its device type; there is one device with one stream, so there is nothing to switch."""

    _kind = torch_private.DEVICE_TYPE
    _fetch = _PYTHON.PyErr_Fetch
    _type, _value, _traceback = _ADDRESSES
    _slots = _SLOTS

    def type_(self) -> Any:
        # Fetch the error before any other call: calls fail while it is set.
        self._fetch(self._type, self._value, self._traceback)
        if self._slots[0]:
            _hold()
        return self._kind


def _hold() -> None:
    _PYTHON.PyErr_NormalizeException(*_ADDRESSES)
    _, error, traceback = (ctypes.cast(slot, ctypes.py_object).value if slot else None for slot in _SLOTS)
    for slot in _SLOTS:
        if slot:
            _PYTHON.Py_DecRef(ctypes.c_void_p(slot))
    _HELD.error = cast("BaseException", error).with_traceback(cast("Any", traceback))


def raise_held(real: Callable[..., Any]) -> Callable[..., Any]:
    """The engine's entry, which raises the exception held while the engine ran."""

    @wraps(real)
    def run(*args: Any, **kwargs: Any) -> Any:
        # At each call: the setting is per thread, and leaving inference mode restores an older one.
        torch_private.backward_on_calling_thread()
        try:
            # A KeyboardInterrupt in `Guard.type_` would abort the process: C++ allows no exception there.
            with uninterrupted(once=True):
                return real(*args, **kwargs)
        except SystemError:
            # Python raises SystemError for a failure without an error set.
            held: BaseException | None = _HELD.__dict__.pop("error", None)
            if held is None:
                raise
        raise held

    return run
