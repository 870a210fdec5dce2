"""The option `precision`: a model computes in a narrow type as under `torch.autocast`, and what it holds keeps its own.

One list of words and one mechanism, whether the backend is asked (`precision`) or the one line (`mixed_precision`):
autocast stands around each call of the model, so that its own Python sees it too. Some models ask whether they are
under autocast, and keep parts of themselves out of it.

With eight-bit floats linear layers compute in these, and everything else as under autocast in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, Final, TypeVar

import torch
from torch import nn

from moaic.device import torch_private
from moaic.precision import PRECISION, precision_of

_MARK: Final = "takes_precision"

Backend = TypeVar("Backend", bound=Callable[..., Any])


@contextmanager
def narrowed(dtype: torch.dtype | None, devices: Iterable[str]) -> Generator[None]:
    """Ops on tensors of these devices are cast as autocast casts them; with None nothing is."""
    with ExitStack() as stack:
        for device in devices if dtype else ():
            stack.enter_context(torch.autocast(device, dtype))
        yield


def takes_precision(backend: Backend) -> Backend:
    """`backend`, around the calls of whose models autocast stands where `torch.compile` has the option."""
    setattr(backend, _MARK, True)
    _install()
    return backend


@cache
def _install() -> None:
    torch_private.dynamo_optimize().patch(_optimize)


def _optimize(real: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(real)
    def optimize(backend: Any = "inductor", *args: Any, **kwargs: Any) -> Any:
        dtype: torch.dtype | None = _asked_of(backend)
        context: Callable[[Any], Any] = real(backend, *args, **kwargs)
        return Narrow(context, dtype) if dtype else context

    return optimize


def _asked_of(backend: Any) -> torch.dtype | None:
    """What `torch.compile` was asked for, if it is for a backend that takes the option."""
    if not hasattr(getattr(backend, "compiler_fn", None), _MARK):
        return None
    return precision_of(backend.kwargs.get("options", {}).get(PRECISION))


@dataclass(frozen=True, slots=True)
class Narrow:
    """What Dynamo makes of a model, and then of its copies, with autocast around their calls.

    Dynamo's own way to stand around calls would leave autocast on: it puts dispatch keys back to what they were inside.
    """

    context: Callable[[Any], Any]
    dtype: torch.dtype

    def __call__(self, model: Any) -> Any:
        compiled: Any = self.context(model)
        # Switched off, `torch.compile` leaves a model as it is.
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
    """Types of devices on which what is compiled computes: a module, a method of one, or any function."""
    owner = getattr(model, "__self__", model)
    parameter = next(owner.parameters(), None) if isinstance(owner, nn.Module) else None
    if parameter is not None:
        return [parameter.device.type]
    return ["cpu", torch_private.NAME] if torch_private.renamed() else ["cpu"]
