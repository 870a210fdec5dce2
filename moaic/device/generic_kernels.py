"""The generic kernels: an aten op on tensors of the device becomes one command to the accelerator.

What an op gives back is known before it has run: the op itself is run once on meta tensors, and the answer is kept by
the geometry of its operands. The values of scalars stay out of that key, so that a learning rate that changes with
every step costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import torch

from moaic.device import cpu_fallback, memory_overlap, torch_private
from moaic.device.dtype_trial import trial_of
from moaic.device.handles import Geometry, extent, geometry_of, new_tensor, place, view_of
from moaic.runtime.controller import session
from moaic.runtime.controller.buffer import View
from moaic.runtime.protocol.aten_schema import ArgKind, Signature

DeviceKernel = Callable[..., Any]

_tuple: Any = tuple
_new: Final[Callable[..., Any]] = _tuple.__new__
"""Makes a View in half the time that its own `__new__` takes, which is written in Python."""

_CACHE_LIMIT: Final = 4096
"""Geometries kept per op; a program that never repeats its shapes starts over instead of growing without end."""

_TENSOR: Final = ArgKind.TENSOR
_TENSORS: Final = ArgKind.TENSORS
_NUMBER: Final = ArgKind.NUMBER

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
"""Ops whose results on meta tensors look different from those on the CPU: tried on zeros instead."""

ResultGeometry = Geometry | None | tuple[Geometry, ...]


class CallPlan(NamedTuple):
    """What an op gives back for operands of one geometry; `single` when that is just one tensor."""

    single: Geometry | None
    results: tuple[ResultGeometry, ...]


class MixedDevices(RuntimeError):
    """Operands on the host that only a scalar may be."""


def pack(signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any], list[Any]]:
    """The arguments as the accelerator takes them, and the key under which the op's results are known."""
    sent: list[Any] = []
    key: list[Any] = []
    for kind, value in zip(signature.kinds, args, strict=False):
        _pack(kind, value, sent, key)
    if not kwargs:
        return tuple(sent), kwargs, key
    named: dict[str, Any] = {}
    for name, value in kwargs.items():
        kind = signature.by_name[name]
        if kind is ArgKind.PLACEMENT:
            check_place(name, value)
            continue
        key.append(name)
        one: list[Any] = []
        _pack(kind, value, one, key)
        named[name] = one[0]
    return tuple(sent), named, key


def check_place(name: str, value: Any) -> None:
    """Refuse what an argument of creation asks for that the device cannot give."""
    if name == "device" and value is not None and value.index not in (None, 0):
        raise RuntimeError(f"there is one device moai, moai:0, not {value}; its workers are not devices of their own")
    if name == "pin_memory" and value:
        raise RuntimeError("only tensors on the cpu can be pinned, not tensors on device moai")
    if name == "layout" and value not in (None, torch.strided):
        raise NotImplementedError(f"device moai holds dense tensors only, not {value}")


def _pack(kind: ArgKind, value: Any, sent: list[Any], key: list[Any]) -> None:
    if kind is _TENSOR:
        try:
            buffer = value.untyped_storage().moai
        except AttributeError:
            sent.append(_odd_operand(value, key))
            return
        shape = value.shape
        strides = value.stride()
        dtype = value.dtype
        sent.append(_new(View, (buffer, shape, strides, value.storage_offset(), dtype)))
        key += (shape, strides, dtype)
    elif kind is _NUMBER:
        sent.append(value)
        key.append(type(value))
    elif kind is _TENSORS:
        sent.append(_pack_list(value, key))
    else:
        plain: Any = tuple(cast("list[Any]", value)) if type(value) is list else value
        sent.append(plain)
        key.append(plain)
        if type(plain) is float:  # arange(6.0) is not arange(6), though 6.0 == 6
            key.append(float)


def _pack_list(tensors: Sequence[Any], key: list[Any]) -> list[Any]:
    key.append(len(tensors))
    views: list[Any] = []
    for tensor in tensors:
        _pack(_TENSOR, tensor, views, key)
    return views


def pack_views(tensors: Sequence[Any]) -> list[Any]:
    """The views of a list of tensors, for ops that need no key: the inner loop of an optimizer's step."""
    try:
        return [
            _new(View, (t.untyped_storage().moai, t.shape, t.stride(), t.storage_offset(), t.dtype)) for t in tensors
        ]
    except AttributeError:
        return _pack_list(tensors, [])


def _odd_operand(value: Any, key: list[Any]) -> Any:
    """An operand that is no tensor of the device: absent, a number, or a scalar on the host, which is sent by value."""
    if not isinstance(value, torch.Tensor):
        key.append(type(value))
        return value
    if value.device.type == "cpu" and value.dim() == 0:
        key.append(value.dtype)
        return value.detach()
    raise MixedDevices(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"moai:0 and {value.device}! Move the tensor of shape {list(value.shape)} with .to('moai')."
    )


def functional(signature: Signature) -> DeviceKernel:
    """The kernel of an op whose results are all new."""
    name, overload = signature.name, signature.overload
    plans: dict[tuple[Any, ...], CallPlan] = {}
    check_types = trial_of(signature)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        sent, named, key = pack(signature, args, kwargs)
        known = tuple(key)
        plan = plans.get(known)
        if plan is None:
            made = results_on_meta(signature, args, kwargs)
            if made is None:
                return cpu_fallback.run(signature, args, kwargs)
            check_types(key, args, kwargs)
            if len(plans) >= _CACHE_LIMIT:
                plans.clear()
            plan = plans[known] = made
        accelerator = session.accelerator()
        single = plan.single
        if single is not None:
            buffer = accelerator.buffer(single.name, single.shape, single.strides)
            accelerator.launch(name, sent, named, (buffer,))
            return place(single, buffer)
        outputs = build(plan)
        accelerator.launch(name, sent, named, _buffers(outputs))
        return outputs if len(outputs) > 1 else outputs[0] if outputs else None

    kernel.__name__ = str(overload)
    return kernel


def in_place_on_lists(signature: Signature) -> DeviceKernel:
    """The kernel of an op that writes lists of tensors and gives nothing back: there is nothing to find out."""
    name = signature.name
    counts_versions = name.startswith("aten._foreach_")  # PyTorch leaves that to the kernels of these ops

    def kernel(*args: Any, **kwargs: Any) -> None:
        sent: list[Any] = []
        for kind, value in zip(signature.kinds, args, strict=False):
            if kind is _TENSORS:
                sent.append(pack_views(value))
            else:
                _pack(kind, value, sent, [])
        named = pack(signature, (), kwargs)[1] if kwargs else kwargs
        session.accelerator().launch(name, tuple(sent), named, ())
        if counts_versions:
            torch_private.increment_version(args[0])

    kernel.__name__ = str(signature.overload)
    return kernel


def mutating(signature: Signature) -> DeviceKernel:
    """The kernel of an op that writes into its arguments; what else it gives back is new."""
    name = signature.name
    plans: dict[tuple[Any, ...], CallPlan] = {}
    takes_out = any(argument.is_out for argument in signature.arguments)
    alone = len(signature.returns) == 1 and signature.returns[0] is not None
    is_elementwise = "pointwise" in signature.tags
    check_types = trial_of(signature)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        sent, named, key = pack(signature, args, kwargs)
        known = tuple(key)
        plan = plans.get(known)
        if is_elementwise and (plan is None or _share([*sent, *named.values()])):
            memory_overlap.check_call(signature, args, kwargs)
        if plan is None:
            plan = results_on_meta(signature, args, kwargs)
            if plan is None:
                return cpu_fallback.run(signature, args, kwargs)
            check_types(key, args, kwargs)
            if takes_out and _grow(signature, plan, args, kwargs):
                return kernel(*args, **kwargs)
            if len(plans) >= _CACHE_LIMIT:
                plans.clear()
            plans[known] = plan
        if alone:
            session.accelerator().launch(name, sent, named, ())
            return signature.argument(signature.returns[0] or 0, args, kwargs)
        fresh = build(
            CallPlan(None, tuple(m for m, at in zip(plan.results, signature.returns, strict=True) if at is None))
        )
        session.accelerator().launch(name, sent, named, _buffers(fresh))
        rest = iter(fresh)
        results = tuple(next(rest) if at is None else signature.argument(at, args, kwargs) for at in signature.returns)
        return results if len(results) > 1 else results[0] if results else None

    kernel.__name__ = str(signature.overload)
    return kernel


def _share(sent: list[Any]) -> bool:
    """Whether two of the operands have one buffer."""
    buffers = [id(value[0]) for value in sent if type(value) is View]
    return len(buffers) > 1 and len(set(buffers)) < len(buffers)


def _grow(signature: Signature, plan: CallPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Resize `out=` tensors to the shape of the result, as every device of PyTorch does; true if one was resized.

    Ops that take `out=` give nothing but these tensors.
    """
    small: dict[str, Geometry] = {}
    for made, at in zip(cast("tuple[Geometry, ...]", plan.results), signature.returns, strict=True):
        name = signature.names[at or 0]
        out: torch.Tensor = kwargs[name]
        if out.shape != made.shape:
            _check_not_read(signature, out, made.shape, args)
            small[name] = made
    if not small:
        return False
    lies = _strides_on_host(signature, small, args, kwargs)
    for name, made in small.items():
        fit(kwargs[name], made.shape, lies.get(name, made.strides))
    return True


def fit(out: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> None:
    """Give an `out=` tensor of another shape the geometry that the CPU would."""
    out.resize_(shape)
    if out.stride() != tuple(strides):
        out.as_strided_(shape, strides)


def _strides_on_host(
    signature: Signature, small: Mapping[str, Geometry], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, tuple[int, ...]]:
    """By name: the strides that a call on the host gives to empty `out=` tensors; none where its values are refused.

    Ops of linear algebra write column by column into what they resize, and what they do on meta tensors does not tell.
    """
    fill = torch.ones if "pointwise" in signature.tags else _identity
    named = {name: _filled(value, fill) for name, value in kwargs.items()}
    named |= {name: torch.empty(0, dtype=made.dtype, device="cpu") for name, made in small.items()}
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
    """Matrices that every decomposition takes; of vectors, indices count from zero and pivots, in int32, from one."""
    if len(shape) > 1:
        return torch.eye(*shape[-2:], dtype=dtype, device=device).expand(shape)
    return torch.full(shape, dtype == torch.int32, dtype=dtype, device=device)


def _check_not_read(signature: Signature, out: torch.Tensor, shape: Sequence[int], args: tuple[Any, ...]) -> None:
    """An elementwise op cannot resize what it reads."""
    if "pointwise" in signature.tags and any(arg is out for arg in args):
        raise RuntimeError(f"output with shape {list(out.shape)} doesn't match the broadcast shape {list(shape)}")


def build(plan: CallPlan) -> tuple[Any, ...]:
    """New tensors for the results of a plan."""
    return tuple(
        None if made is None else new_tensor(made) if isinstance(made, Geometry) else [new_tensor(m) for m in made]
        for made in plan.results
    )


def _buffers(outputs: tuple[Any, ...]) -> list[Any]:
    buffers: list[Any] = []
    for output in outputs:
        if isinstance(output, list):
            buffers += [view_of(tensor).buffer for tensor in cast("list[torch.Tensor]", output)]
        elif output is not None:
            buffers.append(view_of(output).buffer)
    return buffers


def results_on_meta(signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan | None:
    """Run the op on meta tensors; None for one that cannot say what it gives without seeing values."""
    if cpu_fallback.needs_values(signature, args, kwargs):
        return None
    if signature.name.startswith(_TRIED):
        results = signature.overload(*map(_zeros, args), **{name: _zeros(value) for name, value in kwargs.items()})
    else:
        try:
            results = signature.overload(*(_meta(value) for value in args), **_meta_kwargs(signature, kwargs))
        except NotImplementedError:
            return None
    count = len(signature.returns)
    listed = cast("tuple[Any, ...]", results if count > 1 else (results,) if count else ())
    made = tuple(_made(result) for result in listed)
    first = made[0] if len(made) == 1 else None
    return CallPlan(first if isinstance(first, Geometry) else None, made)


def _made(result: Any) -> ResultGeometry:
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
    """Stands for an operand on the host; int32 are pivots, which count from one."""
    if isinstance(value, torch.Tensor):
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
        return made.fill_(1 if value.dtype == torch.int32 else 0)
    if isinstance(value, list | tuple):
        return [_zeros(item) for item in cast("list[Any]", value)]
    return value


def meta_of(tensor: torch.Tensor) -> torch.Tensor:
    """A meta tensor that looks like `tensor`; a host scalar stays what it is, since promotion treats it apart."""
    if tensor.device.type == "cpu" and tensor.dim() == 0:
        return tensor.detach()
    offset = tensor.storage_offset()
    shape, strides = tensor.shape, tensor.stride()
    if offset == 0:
        return torch.empty_strided(shape, strides, dtype=tensor.dtype, device="meta")
    whole = torch.empty(offset + extent(shape, strides), dtype=tensor.dtype, device="meta")
    return whole.as_strided(shape, strides, offset)
