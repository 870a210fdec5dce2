"""The device guard: PyTorch asks it for the device's type, often where an exception of its `type_` ends the process.

* Python runs the handlers of signals, which raise KeyboardInterrupt, in any code of Python. So `type_` has none.
* When a hook raises in backward, PyTorch unwinds the engine while Python's error is still set, and asks for the type. A
  call with an error set fails with another error. So while an engine runs, code of Python fetches the error first, and
  the patched entry of the engine raises it in the end; Ctrl-C waits until then.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps
from itertools import repeat
from typing import Any, Final, cast

from moaic.device import torch_private
from moaic.interrupts import uninterrupted
from moaic.support.traces import shorten

_HELD: Final = threading.local()
"""`error`: the exception held on this thread."""

_PYTHON: Final = ctypes.PyDLL(None)
_PYTHON.PyErr_Fetch.restype = None
_SLOTS: Final = (ctypes.c_void_p * 3)()
"""The error's type, value and traceback, each an owned reference."""

_ADDRESSES: Final = tuple(ctypes.byref(_SLOTS, index * ctypes.sizeof(ctypes.c_void_p)) for index in range(3))

_WITHOUT_CODE: Final[Any] = staticmethod(repeat(torch_private.DEVICE_TYPE).__next__)
"""A callable in C that returns the device's type: no code of Python, and so no handler of a signal, runs in it."""

_ENGINES: Final[list[None]] = []
"""An entry for each engine that runs, of all threads; a list, as threads change it in one step each."""


class Guard(torch_private.DEVICE_GUARD):
    """Tells PyTorch its device type; there is one device with one stream, so there is nothing to switch."""

    # Without a dict of its own: looking into it for `type_` fails while an error is set.
    __slots__ = ()

    type_ = _WITHOUT_CODE

    _kind = torch_private.DEVICE_TYPE
    _fetch = _PYTHON.PyErr_Fetch
    _type, _value, _traceback = _ADDRESSES
    _slots = _SLOTS

    def _holding_type(self) -> Any:
        # Fetch the error before any other call: calls fail while it is set.
        self._fetch(self._type, self._value, self._traceback)
        if self._slots[0]:
            _hold()
        return self._kind

    @classmethod
    @contextmanager
    def holding_errors(cls) -> Generator[None]:
        """Hold errors while an engine runs, on any thread."""
        _ENGINES.append(None)
        cls.type_ = cls._holding_type
        try:
            yield
        finally:
            _ENGINES.pop()
            if not _ENGINES:
                cls.type_ = _WITHOUT_CODE


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
            with uninterrupted(once=True), Guard.holding_errors():
                return real(*args, **kwargs)
        except SystemError:
            # Python raises SystemError for a failure without an error set.
            held: BaseException | None = _HELD.__dict__.pop("error", None)
            if held is None:
                raise
        except Exception as error:
            if torch_private.DIFFERENTIATED_TWICE in str(error):
                error.add_note("hint: run it op by op: model.forward = torch.compiler.disable(model.forward)")
            shorten(error)
            raise
        raise held

    return run
