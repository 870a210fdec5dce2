"""Ops that run in this process on the host: value-dependent ops, random ops, and ops without a kernel.

Random ops draw from the CPU's default generator, so an eager program draws the same numbers as on the CPU. Each other
op that runs here costs a round trip to the workers, and warns once.
"""

from __future__ import annotations

import inspect
import warnings
from functools import cache
from typing import Any, Final, cast

import torch

from moaic.device.handles import extent, is_ours
from moaic.device.transfer import as_dense, overwrite, to_device, to_host, with_strides
from moaic.runtime.protocol.aten_schema import ArgKind, Signature

REPLACING: Final = frozenset(
    f"aten.{name}_"
    for name in ("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "random", "uniform")
)
"""Random ops that do not read the tensor that they overwrite."""


class HostWarning(UserWarning):
    """An op ran on the host."""


def must_see_values(signature: Signature) -> bool:
    """Whether shapes or types of the op's results depend on the values of its operands."""
    if signature.name == "aten._linalg_check_errors":
        return True
    return bool(signature.tags & {"dynamic_output_shape", "data_dependent_output"}) or not signature.gives_tensors


def _gives_results(signature: Signature) -> bool:
    """Whether the op returns tensors."""
    return bool(signature.returns) and signature.gives_tensors


def needs_values(signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call must run on the host: an index by a mask."""
    if signature.name != "aten.index.Tensor":
        return False
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


@cache
def _warn_once(name: str) -> None:
    warnings.warn(
        f"{name} on device moai runs on the host: its operands are fetched and its result is sent back, every time",
        HostWarning,
        stacklevel=user_stack_level(),
    )


def user_stack_level() -> int:
    """Number of stack frames between the warning and the user's line."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in ("moaic", "torch"):
        level, frame = level + 1, frame.f_back
    return level


def run(signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op on the host and send its results to the device, with a warning."""
    _warn_once(signature.name)
    return run_without_warning(signature, args, kwargs)


def run_without_warning(signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`run` for ops that are meant to run on the host."""
    replaces = signature.name.partition(".")[2].partition(".")[0]
    blank = f"aten.{replaces}" in REPLACING
    fetched: dict[int, torch.Tensor] = {}
    host_args = [_fetch(value, fetched, blank and i == 0) for i, value in enumerate(args)]
    host_kwargs = {name: _fetch(value, fetched, False) for name, value in kwargs.items()}
    if signature.takes_device:
        host_kwargs["device"] = torch.device("cpu")
        host_kwargs.pop("pin_memory", None)
    results = signature.overload(*host_args, **host_kwargs)
    for position in signature.written:
        _write_back(signature.argument(position, args, kwargs), fetched)
    return _bring_back(signature, results, args, kwargs)


def _fetch(value: Any, fetched: dict[int, torch.Tensor], blank: bool) -> Any:
    if isinstance(value, torch.Tensor):
        if not is_ours(value):
            return value
        if id(value) not in fetched:
            fetched[id(value)] = _blank(value) if blank else with_strides(to_host(value), value.stride())
        return fetched[id(value)]
    if isinstance(value, list | tuple):
        return [_fetch(item, fetched, blank) for item in cast("list[Any]", value)]
    return value


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def _write_back(written: Any, fetched: dict[int, torch.Tensor]) -> None:
    listed = cast("list[Any]", written if isinstance(written, list | tuple) else [written])
    for tensor in listed:
        values = fetched.get(id(tensor))
        if values is None:
            continue
        if tensor.shape != values.shape:
            tensor.resize_(values.shape).as_strided_(values.shape, values.stride())
        overwrite(tensor, values)


def _bring_back(signature: Signature, results: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not signature.returns:
        return None
    listed = cast("list[Any]", results if len(signature.returns) > 1 else [results])
    brought = tuple(
        _bring(result) if source is None else signature.argument(source, args, kwargs)
        for result, source in zip(listed, signature.returns, strict=True)
    )
    return brought if len(brought) > 1 else next(iter(brought))


def _bring(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        plain = as_dense(result)
        return to_device(plain) if plain.stride() == result.stride() else _with_gaps(result)
    if isinstance(result, list | tuple):
        return [_bring(item) for item in cast("list[Any]", result)]
    return result


def _with_gaps(result: torch.Tensor) -> torch.Tensor:
    """A result with gaps, as a view of a larger tensor of the device."""
    whole = result.as_strided((extent(result.shape, result.stride()),), (1,))
    return to_device(whole).as_strided(result.shape, result.stride(), 0)


def kernel(signature: Signature) -> Any:
    """A kernel that runs each call of the op on the host."""
    silent = signature.is_random or ArgKind.TENSOR not in signature.kinds or not _gives_results(signature)
    run_op = run_without_warning if silent else run

    def on_host(*args: Any, **kwargs: Any) -> Any:
        return run_op(signature, args, kwargs)

    return on_host
