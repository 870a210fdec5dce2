"""The device guard, and how exceptions of hooks get past it.

When a hook raises in backward, PyTorch unwinds the engine while Python's error is still set, and asks the guard for its
device type on the way. Python answers a call with an error set by another error, and an error in a guard that is being
left ends the process. So the guard takes the error aside, and whoever called the engine raises it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Final, cast

from moaic.device import torch_private

_HELD: Final = threading.local()
"""`error`: the exception that was taken aside on this thread."""

_PYTHON: Final = ctypes.PyDLL(None)
_PYTHON.PyErr_Fetch.restype = None
_SLOTS: Final = (ctypes.c_void_p * 3)()
"""The error's type, value and traceback, each a reference of ours."""

_ADDRESSES: Final = tuple(ctypes.byref(_SLOTS, index * ctypes.sizeof(ctypes.c_void_p)) for index in range(3))


class Guard(torch_private.DEVICE_GUARD):
    """Answers which device it is for; there is one device, and it has one stream."""

    _kind = torch_private.DEVICE_TYPE
    _fetch = _PYTHON.PyErr_Fetch
    _type, _value, _traceback = _ADDRESSES
    _slots = _SLOTS

    def type_(self) -> Any:
        # Until the error is fetched no other call may be made: each would end in an error of its own.
        self._fetch(self._type, self._value, self._traceback)
        if self._slots[0]:
            _take_aside()
        return self._kind


def _take_aside() -> None:
    _PYTHON.PyErr_NormalizeException(*_ADDRESSES)
    _, error, traceback = (ctypes.cast(slot, ctypes.py_object).value if slot else None for slot in _SLOTS)
    for slot in _SLOTS:
        if slot:
            _PYTHON.Py_DecRef(ctypes.c_void_p(slot))
    _HELD.error = cast("BaseException", error).with_traceback(cast("Any", traceback))


def raise_held(real: Callable[..., Any]) -> Callable[..., Any]:
    """The engine, which raises what was taken aside while it ran."""

    @wraps(real)
    def run(*args: Any, **kwargs: Any) -> Any:
        # Each time: a thread has that setting for itself, and leaving inference mode puts back an older one.
        torch_private.backward_on_calling_thread()
        try:
            return real(*args, **kwargs)
        except SystemError:
            # How Python calls a failure without an error.
            held: BaseException | None = _HELD.__dict__.pop("error", None)
            if held is None:
                raise
        raise held

    return run
