"""What a backend adds to `torch.compile` itself, which calls the backend only when the model is first called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any, Final, TypeVar

from moaic.device import torch_private
from moaic.ir.errors import Diagnostic
from moaic.support.traces import shorten

Backend = TypeVar("Backend", bound=Callable[..., Any])

Compile = Callable[[Any], Any]
"""Compiles a model, as `torch.compile` does once it knows backend and options."""

Hook = Callable[[Mapping[str, Any], Compile], Compile]
"""Takes the `options` and the `mode` that `torch.compile` was given, if any; may raise, or put something around."""

Check = Callable[[Mapping[str, object], str | None], None]
"""Takes the options and the mode. Raises Diagnostic."""

_HOOKS: Final = "compile_hooks"


def hooked(backend: Backend, hook: Hook) -> Backend:
    """`backend`, marked: `torch.compile` with it calls `hook`, after the hooks that it has already."""
    setattr(backend, _HOOKS, (*getattr(backend, _HOOKS, ()), hook))
    _install()
    return backend


def checks_options(check: Check) -> Callable[[Backend], Backend]:
    """A decorator of backends: mistakes in options are found at once, not when the model first runs, much later."""

    def hook(settings: Mapping[str, Any], compile_: Compile) -> Compile:
        check(settings.get("options", {}), settings.get("mode"))
        return compile_

    return lambda backend: hooked(backend, hook)


@cache
def _install() -> None:
    torch_private.dynamo_optimize().patch(_optimize)


def _optimize(real: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(real)
    def optimize(backend: Any = "inductor", *args: Any, **kwargs: Any) -> Any:
        compile_: Compile = real(backend, *args, **kwargs)
        hooks: tuple[Hook, ...] = getattr(getattr(backend, "compiler_fn", None), _HOOKS, ())
        options: Any = getattr(backend, "kwargs", {}).get("options") if hooks else None
        if options is not None and not isinstance(options, Mapping):
            raise Diagnostic(
                f"the options of torch.compile are {options!r}, which is no dict", hint='for example options={"dp": 2}'
            )
        try:
            for hook in hooks:
                compile_ = hook(backend.kwargs, compile_)
        except Exception as error:
            shorten(error)
            raise
        return compile_

    return optimize
