"""The option `precision`: a model computes in a narrow type as under `torch.autocast`; its parameters keep theirs.

The option of the backend (`precision`) and that of the one line (`mixed_precision`) take the same words and do the
same: autocast is entered around each call of the model. So the model's own Python sees it too: some models ask whether
autocast is on, and switch it off for parts of themselves.

With eight-bit floats, linear layers compute in these and all else as under autocast in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import nn

from moaic.capture.compile_hooks import Backend, Compile, hooked
from moaic.device import torch_private
from moaic.precision import PRECISION, precision_of


@contextmanager
def narrowed(dtype: torch.dtype | None, devices: Iterable[str]) -> Generator[None]:
    """Enter autocast to `dtype` for these devices; do nothing if it is None."""
    with ExitStack() as stack:
        for device in devices if dtype else ():
            stack.enter_context(torch.autocast(device, dtype))
        yield


def takes_precision(backend: Backend) -> Backend:
    """`backend`, marked: calls of its models run under autocast if `torch.compile` was given the option."""
    return hooked(backend, _narrowing)


def _narrowing(settings: Mapping[str, Any], compile_: Compile) -> Compile:
    dtype = precision_of(settings.get("options", {}).get(PRECISION))
    return Narrow(compile_, dtype) if dtype else compile_


@dataclass(frozen=True, slots=True)
class Narrow:
    """Compiles a model by Dynamo, and later its copies, and puts autocast around their calls.

    A context that Dynamo enters around a call would leave autocast on: after the call Dynamo restores the dispatch keys
    that it saw inside.
    """

    context: Callable[[Any], Any]
    dtype: torch.dtype

    def __call__(self, model: Any) -> Any:
        compiled: Any = self.context(model)
        # With Dynamo disabled, `torch.compile` returns the model itself.
        if compiled is model:
            return model
        if not isinstance(model, nn.Module):
            return self._around(model, compiled)
        compiled.dynamo_ctx = self
        compiled.forward = self._around(model, compiled.forward)
        return compiled

    def _around(self, model: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def narrow(*args: Any, **kwargs: Any) -> Any:
            with narrowed(self.dtype, places_of(model)):
                return call(*args, **kwargs)

        return narrow


def places_of(model: Any) -> list[str]:
    """The device types that a compiled callable computes on: a module, a method of one, or any function."""
    owner = getattr(model, "__self__", model)
    parameter = next(owner.parameters(), None) if isinstance(owner, nn.Module) else None
    if parameter is not None:
        return [parameter.device.type]
    return ["cpu", torch_private.NAME] if torch_private.renamed() else ["cpu"]
