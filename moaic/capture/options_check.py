"""Options of a backend are checked when `torch.compile` is called, not when the model first is, much later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any, Final, TypeVar

from moaic.device import torch_private

Backend = TypeVar("Backend", bound=Callable[..., Any])

Check = Callable[[Mapping[str, object], str | None], None]
"""Takes the options and the mode that `torch.compile` was given. Raises Diagnostic."""

_MARK: Final = "check_options"


def checks_options(check: Check) -> Callable[[Backend], Backend]:
    """A decorator of backends: `torch.compile` with one calls `check`."""

    def mark(backend: Backend) -> Backend:
        setattr(backend, _MARK, check)
        _install()
        return backend

    return mark


@cache
def _install() -> None:
    torch_private.dynamo_optimize().patch(_optimize)


def _optimize(real: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(real)
    def optimize(backend: Any = "inductor", *args: Any, **kwargs: Any) -> Any:
        check: Check | None = getattr(getattr(backend, "compiler_fn", None), _MARK, None)
        if check is not None:
            check(backend.kwargs.get("options", {}), backend.kwargs.get("mode"))
        return real(backend, *args, **kwargs)

    return optimize
