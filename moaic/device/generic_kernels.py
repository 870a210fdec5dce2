"""The generic kernels: an aten op on tensors of the device becomes one command to the accelerator.

The geometry of the results is found before the op runs on the workers: the op runs on meta tensors, once per key of a
call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import torch

from moaic.device import cpu_fallback, memory_overlap, torch_private
from moaic.device.call_packing import form_of, packer
from moaic.device.dtype_trial import trial_of
from moaic.device.handles import Geometry, extent, full_tensor, geometry_of, new_tensor, view_of
from moaic.runtime.controller import session
from moaic.runtime.controller.buffer import Buffer
from moaic.runtime.controller.eager_call import CallForm
from moaic.runtime.protocol.aten_schema import Signature

DeviceKernel = Callable[..., Any]

_CACHE_LIMIT: Final = 4096
"""Calls remembered per op; the cache is cleared when it is full, which bounds it for programs with ever new shapes."""

_TRIED: Final = (
    "aten._embedding_bag",
    "aten._fft_",
    "aten._grouped_mm",
    "aten._linalg_svd",
    "aten.linalg_eig",
    "aten.max_unpool",
    "aten.multilabel_margin_loss_forward",
    "aten.nonzero_static",
)
"""Ops whose results on meta tensors differ in shape or type from those on the CPU: run on zeros instead."""

ResultGeometry = Geometry | None | tuple[Geometry, ...]


class CallPlan(NamedTuple):
    """The form of calls of one key, and the geometries of their new results."""

    form: CallForm
    single: Geometry | None
    """The result, where there is just one new tensor."""
    results: tuple[ResultGeometry, ...]


class _Plans(dict[tuple[Any, ...], CallPlan]):
    """The plans of an op, by the key of the call."""

    def remember(
        self,
        key: tuple[Any, ...],
        signature: Signature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: tuple[ResultGeometry, ...],
    ) -> CallPlan:
        """Keep the plan of a call whose new results have the geometries `results`."""
        form = form_of(signature, args, kwargs, _flat(results))
        only = results[0] if len(results) == 1 else None
        if len(self) >= _CACHE_LIMIT:
            self.clear()
        plan = self[key] = CallPlan(form, only if isinstance(only, Geometry) else None, results)
        return plan


def _flat(results: Iterable[ResultGeometry]) -> Iterator[Geometry]:
    for result in results:
        if isinstance(result, Geometry):
            yield result
        elif result is not None:
            yield from result


def functional(signature: Signature) -> DeviceKernel:
    """The kernel of an op that returns only new tensors."""
    plans = _Plans()
    pack = packer(signature)
    check_types = trial_of(signature)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        packed = pack(args, kwargs)
        plan = plans.get(packed.key)
        if plan is None:
            results = results_on_meta(signature, args, kwargs)
            if results is None:
                return cpu_fallback.run(signature, args, kwargs)
            check_types(packed.key, args, kwargs)
            plan = plans.remember(packed.key, signature, args, kwargs, results)
        accelerator = session.accelerator()
        single = plan.single
        if single is not None:
            buffer = accelerator.buffer(single.name, single.shape, single.strides)
            accelerator.launch_call(packed.eager(plan.form), (buffer,))
            return full_tensor(single, buffer)
        outputs = build(plan.results)
        accelerator.launch_call(packed.eager(plan.form), _buffers(outputs))
        return outputs if len(outputs) > 1 else outputs[0] if outputs else None

    kernel.__name__ = str(signature.overload)
    return kernel


def writing(signature: Signature) -> DeviceKernel:
    """The kernel of an op that writes into its arguments and returns no new tensor; it does not run on meta tensors."""
    plans = _Plans()
    pack = packer(signature)
    counts_versions = signature.name.startswith("aten._foreach_")  # PyTorch leaves that to the kernels of these ops

    def kernel(*args: Any, **kwargs: Any) -> None:
        packed = pack(args, kwargs)
        plan = plans.get(packed.key) or plans.remember(packed.key, signature, args, kwargs, ())
        session.accelerator().launch_call(packed.eager(plan.form), ())
        if counts_versions:
            torch_private.increment_version(args[0])

    kernel.__name__ = str(signature.overload)
    return kernel


def mutating(signature: Signature) -> DeviceKernel:
    """The kernel of an op that writes into its arguments and may return new tensors too."""
    plans = _Plans()
    pack = packer(signature)
    takes_out = any(argument.is_out for argument in signature.arguments)
    returns_argument = len(signature.returns) == 1 and signature.returns[0] is not None
    is_elementwise = "pointwise" in signature.tags
    check_types = trial_of(signature)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        packed = pack(args, kwargs)
        plan = plans.get(packed.key)
        if is_elementwise and (plan is None or _share(packed.buffers)):
            memory_overlap.check_call(signature, args, kwargs)
        if plan is None:
            results = results_on_meta(signature, args, kwargs)
            if results is None:
                return cpu_fallback.run(signature, args, kwargs)
            check_types(packed.key, args, kwargs)
            if takes_out and _grow(signature, results, args, kwargs):
                return kernel(*args, **kwargs)
            new = tuple(result for result, source in zip(results, signature.returns, strict=True) if source is None)
            plan = plans.remember(packed.key, signature, args, kwargs, new)
        if returns_argument:
            session.accelerator().launch_call(packed.eager(plan.form), ())
            return signature.argument(signature.returns[0] or 0, args, kwargs)
        fresh = build(plan.results)
        session.accelerator().launch_call(packed.eager(plan.form), _buffers(fresh))
        rest = iter(fresh)
        results = tuple(
            next(rest) if source is None else signature.argument(source, args, kwargs) for source in signature.returns
        )
        return results if len(results) > 1 else results[0] if results else None

    kernel.__name__ = str(signature.overload)
    return kernel


def _share(buffers: list[Buffer]) -> bool:
    """Whether two of the operands have one buffer."""
    return len(buffers) > 1 and len(set(buffers)) < len(buffers)


def _grow(
    signature: Signature, results: tuple[ResultGeometry, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Resize `out=` tensors to the shape of the result, as PyTorch does; True if one was resized.

    Ops with `out=` return only these tensors.
    """
    small: dict[str, Geometry] = {}
    for result, source in zip(cast("tuple[Geometry, ...]", results), signature.returns, strict=True):
        name = signature.names[source or 0]
        out: torch.Tensor = kwargs[name]
        if out.shape != result.shape:
            _check_not_read(signature, out, result.shape, args)
            small[name] = result
    if not small:
        return False
    strides = _strides_on_host(signature, small, args, kwargs)
    for name, result in small.items():
        fit(kwargs[name], result.shape, strides.get(name, result.strides))
    return True


def fit(out: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> None:
    """Resize an `out=` tensor to the geometry that it would have on the CPU."""
    out.resize_(shape)
    if out.stride() != tuple(strides):
        out.as_strided_(shape, strides)


def _strides_on_host(
    signature: Signature, small: Mapping[str, Geometry], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, tuple[int, ...]]:
    """By name the strides that a call on the host gives to empty `out=` tensors; empty if the host refuses the values.

    Ops of linear algebra resize to column-major strides, but not on meta tensors.
    """
    fill = torch.ones if "pointwise" in signature.tags else _identity
    named = {name: _filled(value, fill) for name, value in kwargs.items() if name not in small}
    named |= {name: torch.empty(0, dtype=result.dtype, device="cpu") for name, result in small.items()}
    try:
        signature.overload(*(_filled(value, fill) for value in args), **named)
    except RuntimeError:
        return {}
    return {name: value.stride() for name, value in named.items() if isinstance(value, torch.Tensor)}


def _filled(value: Any, fill: Callable[..., torch.Tensor]) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return _zeros(value).copy_(fill(value.shape, dtype=value.dtype, device="cpu"))


def _identity(shape: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Identity matrices, which every decomposition accepts; vectors of ones in int32 (pivots), else zeros (indices)."""
    if len(shape) > 1:
        return torch.eye(*shape[-2:], dtype=dtype, device=device).expand(shape)
    return torch.full(shape, dtype == torch.int32, dtype=dtype, device=device)


def _check_not_read(signature: Signature, out: torch.Tensor, shape: Sequence[int], args: tuple[Any, ...]) -> None:
    """Raise if an elementwise op would resize a tensor that it reads."""
    if "pointwise" in signature.tags and any(arg is out for arg in args):
        raise RuntimeError(f"output with shape {list(out.shape)} doesn't match the broadcast shape {list(shape)}")


def build(results: tuple[ResultGeometry, ...]) -> tuple[Any, ...]:
    """New tensors of these geometries."""
    return tuple(
        None
        if result is None
        else new_tensor(result)
        if isinstance(result, Geometry)
        else [new_tensor(m) for m in result]
        for result in results
    )


def _buffers(outputs: tuple[Any, ...]) -> list[Any]:
    buffers: list[Any] = []
    for output in outputs:
        if isinstance(output, list):
            buffers += [view_of(tensor).buffer for tensor in cast("list[torch.Tensor]", output)]
        elif output is not None:
            buffers.append(view_of(output).buffer)
    return buffers


def results_on_meta(
    signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[ResultGeometry, ...] | None:
    """The geometries of an op's results, found on meta tensors; None where they depend on the operands' values."""
    if cpu_fallback.needs_values(signature, args, kwargs):
        return None
    if signature.name.startswith(_TRIED):
        results = signature.overload(*map(_zeros, args), **{name: _zeros(value) for name, value in kwargs.items()})
    else:
        on_meta, named = [_meta(value) for value in args], _meta_kwargs(signature, kwargs)
        try:
            results = signature.overload(*on_meta, **named)
        except (NotImplementedError, ZeroDivisionError):
            # A few of PyTorch's functions for meta tensors divide by the number of elements, which may be zero.
            return None
        except AssertionError as error:
            # PyTorch's own: a few of its functions for meta tensors assert what its kernels check.
            raise RuntimeError(str(error)) from error
    count = len(signature.returns)
    wanted = signature.asked_for(results, args, kwargs)
    listed = cast("tuple[Any, ...]", wanted if count > 1 else (results,) if count else ())
    return tuple(_result_geometry(result) for result in listed)


def _result_geometry(result: Any) -> ResultGeometry:
    if result is None:
        return None
    if isinstance(result, torch.Tensor):
        return geometry_of(result)
    return tuple(geometry_of(tensor) for tensor in result)


def _meta_kwargs(signature: Signature, kwargs: dict[str, Any]) -> dict[str, Any]:
    named = {name: _meta(value) for name, value in kwargs.items()}
    if signature.takes_device:
        named["device"] = torch.device("meta")
        named.pop("pin_memory", None)
    return named


def _meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return meta_of(value)
    if isinstance(value, list | tuple):
        return [_meta(item) for item in cast("list[Any]", value)]
    return value


def _zeros(value: Any) -> Any:
    """Zeros on the host in place of an operand; ones for int32, since pivots count from one."""
    if isinstance(value, torch.Tensor):
        result = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
        return result.fill_(1 if value.dtype == torch.int32 else 0)
    if isinstance(value, list | tuple):
        return [_zeros(item) for item in cast("list[Any]", value)]
    return value


def meta_of(tensor: torch.Tensor) -> torch.Tensor:
    """A meta tensor with the geometry of `tensor`; 0-dim host tensors are kept, as type promotion treats them apart."""
    if tensor.device.type == "cpu" and tensor.dim() == 0:
        return tensor.detach()
    offset = tensor.storage_offset()
    shape, strides = tensor.shape, tensor.stride()
    if offset == 0:
        return torch.empty_strided(shape, strides, dtype=tensor.dtype, device="meta")
    whole = torch.empty(offset + extent(shape, strides), dtype=tensor.dtype, device="meta")
    return whole.as_strided(shape, strides, offset)
