"""Kernels written for the device: creation, copies, views, resizing, reading a scalar, ops without a worker kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from moaic.device import memory_overlap, torch_private
from moaic.device.batch_norm import KERNELS as BATCH_NORM
from moaic.device.call_packing import check_placement
from moaic.device.determinants import KERNELS as DETERMINANTS
from moaic.device.generic_kernels import meta_of, writing
from moaic.device.handles import dtype_name, extent, geometry, is_ours, new_tensor, view_of
from moaic.device.recurrent_cells import KERNELS as RECURRENT
from moaic.device.sparse_gradients import KERNELS as SPARSE_GRADIENTS
from moaic.device.storages import ensure_buffer
from moaic.device.transfer import overwrite, resolved, to_device, to_host
from moaic.device.view_copies import KERNELS as VIEWS
from moaic.runtime.controller import session
from moaic.runtime.controller.buffer import row_major
from moaic.runtime.protocol.aten_schema import signature_of

aten: Final[Any] = torch.ops.aten

_launch_copy: Final = writing(signature_of(aten.copy_.default))
_launch_fill: Final = writing(signature_of(aten.fill_.Scalar))
_view: Final = torch_private.metadata_kernel(aten.view.default)
_view_dtype: Final = torch_private.metadata_kernel(aten.view.dtype)
_resize: Final = torch_private.metadata_kernel(aten.resize_.default)
_set_geometry: Final = torch_private.set_geometry_kernel()
_KEYS: Final = torch_private.CPU_KEYS


def empty(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    memory_format: torch.memory_format | None = None,
    **placement: Any,
) -> torch.Tensor:
    _check_placements(placement)
    element_type = dtype or torch.get_default_dtype()
    if memory_format in (None, torch.contiguous_format):
        shape = tuple(size)
        _check_sizes(shape)
        return new_tensor(geometry(element_type, shape, row_major(shape)))
    like = torch.empty(size, dtype=element_type, device="meta", memory_format=memory_format)
    return new_tensor(geometry(element_type, like.shape, like.stride()))


def empty_strided(
    size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype | None = None, **placement: Any
) -> torch.Tensor:
    _check_placements(placement)
    _check_sizes(size)
    return new_tensor(geometry(dtype or torch.get_default_dtype(), size, stride))


def _check_placements(placement: Mapping[str, Any]) -> None:
    for name, value in placement.items():
        check_placement(name, value)


def _check_sizes(size: Sequence[int]) -> None:
    if any(dim < 0 for dim in size):
        raise RuntimeError(f"Trying to create tensor with negative dimension {min(size)}: {list(size)}")


def full(size: Sequence[int], fill_value: Any, *, dtype: torch.dtype | None = None, **placement: Any) -> torch.Tensor:
    _check_placements(placement)
    element_type = dtype or torch.full((), fill_value, device="cpu").dtype
    shape = tuple(size)
    _check_sizes(shape)
    return fill_(new_tensor(geometry(element_type, shape, row_major(shape))), fill_value)


def zeros(size: Sequence[int], *, dtype: torch.dtype | None = None, **placement: Any) -> torch.Tensor:
    """`_efficientzerotensor`: torch stores no zeros for it, the device does."""
    return full(size, 0, dtype=dtype or torch.get_default_dtype(), **placement)


def fill_(tensor: torch.Tensor, value: Any) -> torch.Tensor:
    """Fill with a number; a whole tensor that is on no worker yet is filled where it is first used."""
    view = view_of(tensor)
    if view.is_whole and not isinstance(value, complex):
        session.accelerator().fill(view.buffer, _as_element(value, tensor.dtype))
    else:
        _launch_fill(tensor, value)
    return tensor


def _as_element(value: Any, dtype: torch.dtype) -> bool | int | float:
    """`value` converted to `dtype` but for rounding; overflow raises as on the CPU."""
    if dtype == torch.bool:
        return bool(value)
    if dtype.is_floating_point or dtype.is_complex:
        return float(value)
    return int(torch.full((), value, dtype=dtype).item())


def zero_(tensor: torch.Tensor) -> torch.Tensor:
    return fill_(tensor, 0)


def fill_tensor_(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if value.dim() != 0:
        raise RuntimeError(
            f"fill_ only supports 0-dimension value tensor but got tensor with {value.dim()} dimensions."
        )
    if not is_ours(value):
        return fill_(tensor, value.item())
    return copy_(tensor, value.clone() if torch_private.share(tensor, value) else value)


def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy with broadcasting and conversion, in each direction."""
    _check_broadcast(target, source)
    if not is_ours(target):
        target.copy_(to_host(source))
    elif target.is_conj() or target.is_neg():
        _copy_through(target, source)
    elif not is_ours(source):
        memory_overlap.check_written(target)
        overwrite(target, source)
    elif not memory_overlap.is_same(target, source):
        memory_overlap.check_written(target, source)
        _launch_copy(target, resolved(source))
    return target


def _copy_through(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy into a lazily conjugated or negated tensor."""
    if target.is_conj():
        target.conj().copy_(source.conj())
    else:
        aten._neg_view.default(target).copy_(-source)


def _check_broadcast(target: torch.Tensor, source: torch.Tensor) -> None:
    wanted, given = target.shape, source.shape
    if wanted == given:
        return
    tail = wanted[len(wanted) - len(given) :] if len(given) <= len(wanted) else None
    if tail is None or any(size not in (1, length) for size, length in zip(given, tail, strict=True)):
        raise RuntimeError(f"output with shape {list(wanted)} doesn't match the broadcast shape {list(given)}")


def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return copy_(target, source, non_blocking)


def copy_from_and_resize(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return copy_(target.resize_(source.shape), source)


def to_copy(
    tensor: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    memory_format: torch.memory_format | None = None,
    layout: torch.layout | None = None,
    **_: Any,
) -> torch.Tensor:
    """The copy that `.to`, `.cpu`, `.float` and similar methods make, in each direction."""
    element_type = dtype or tensor.dtype
    target = device or tensor.device
    check_placement("layout", layout)
    if target.type == torch_private.NAME:
        check_placement("device", target)
    if not is_ours(tensor):
        host = aten._to_copy.default(tensor, dtype=dtype, memory_format=memory_format)
        return to_device(host)
    if target.type == torch_private.NAME:
        like = aten._to_copy.default(meta_of(tensor), dtype=element_type, memory_format=memory_format)
        return copy_(new_tensor(geometry(element_type, like.shape, like.stride())), tensor)
    host = to_host(tensor)
    wanted = torch.empty_strided(tensor.shape, tensor.stride(), dtype=element_type, device="meta")
    strides = torch.empty_like(wanted, memory_format=memory_format or torch.preserve_format).stride()
    if target.type == "cpu" and host.dtype == element_type and host.stride() == strides:
        return host
    return torch.empty_strided(tensor.shape, strides, dtype=element_type, device=target).copy_(host)


def item(tensor: torch.Tensor) -> Any:
    return to_host(tensor).item()


def resize_(
    tensor: torch.Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None
) -> torch.Tensor:
    """Change the shape; a storage that is too small is replaced by a larger one."""
    like = torch.empty(size, dtype=tensor.dtype, device="meta", memory_format=memory_format or torch.contiguous_format)
    offset: Any = tensor.storage_offset()
    available = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    needed = offset + extent(like.shape, like.stride())
    if tensor.shape == like.shape or needed <= available:
        return _resize(tensor, size, memory_format=memory_format)
    return _grow(tensor, like, needed if offset else None, available)


def _grow(tensor: torch.Tensor, like: torch.Tensor, flat: int | None, kept: int) -> torch.Tensor:
    """Give a tensor a new storage, as large as `like` or of `flat` elements, that begins with the old content."""
    if torch_private.is_shared(tensor):
        raise NotImplementedError(
            f"a tensor of shape {list(tensor.shape)} on device moai cannot grow to {list(like.shape)}: "
            "other tensors share its storage, which cannot be enlarged; resize a clone() of it"
        )
    shape, strides = (like.shape, like.stride()) if flat is None else ((flat,), (1,))
    grown = new_tensor(geometry(tensor.dtype, shape, strides))
    if kept:
        grown.as_strided((kept,), (1,)).copy_(tensor.as_strided((kept,), (1,), 0))
    return _set_geometry(
        _KEYS, tensor, grown.untyped_storage(), tensor.storage_offset(), tuple(like.shape), like.stride()
    )


def set_(tensor: torch.Tensor) -> torch.Tensor:
    nothing = new_tensor(geometry(tensor.dtype, (0,), (1,)))
    return _set_geometry(_KEYS, tensor, nothing.untyped_storage(), 0, (0,), (1,))


def set_storage(tensor: torch.Tensor, source: Any) -> torch.Tensor:
    count = source.nbytes() // tensor.dtype.itemsize
    return set_storage_offset(tensor, source, 0, (count,), (1,))


def set_storage_offset(
    tensor: torch.Tensor, source: Any, storage_offset: int, size: Sequence[int], stride: Sequence[int] = ()
) -> torch.Tensor:
    """Set the storage of a tensor; a storage of untyped bytes gets a buffer of the tensor's type."""
    strides = tuple(stride) if len(stride) == len(size) else row_major(tuple(size))
    ensure_buffer(source, tensor.dtype)
    return _set_geometry(_KEYS, tensor, source, storage_offset, tuple(size), strides)


def set_tensor(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    offset: Any = source.storage_offset()
    return set_storage_offset(tensor, source.untyped_storage(), offset, source.shape, source.stride())


def lazy_clone(tensor: torch.Tensor) -> torch.Tensor:
    """An immediate copy: PyTorch's lazy copy needs a C++ allocator, which the device does not have."""
    return tensor.clone()


def view_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A view of the same bits as another type."""
    dtype_name(dtype)  # raises for an unsupported type
    return _view_dtype(tensor, dtype)


def view_copy(tensor: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """A contiguous copy in another shape, also where no view has that shape."""
    return tensor.contiguous().view(size).clone()


def unsafe_view(tensor: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    return _view(tensor, size)


def histc(tensor: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:  # noqa: A002
    """Histogram, also of integers, which other accelerators support and the CPU does not."""
    if not tensor.is_floating_point():
        return aten.histc.default(tensor.double(), bins, min, max).to(tensor.dtype)
    new = new_tensor(geometry(tensor.dtype, (bins,), (1,)))
    session.accelerator().launch("aten.histc", (view_of(tensor), bins, min, max), {}, [view_of(new).buffer])
    return new


def unscale(tensors: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """The op of GradScaler: divide by the scale and detect non-finite values, by ops that run on shards."""
    if not tensors:
        return
    largest = torch.stack([norm.float() for norm in aten._foreach_norm.Scalar(tensors, float("inf"))])
    found_inf.copy_(torch.maximum(found_inf, largest.isfinite().all().logical_not().to(found_inf.dtype)))
    aten._foreach_mul_.Tensor(tensors, inv_scale)


def no_op(*_: Any, **__: Any) -> None:
    """An op without effect on the device, such as `record_stream`."""


def always_false(*_: Any, **__: Any) -> bool:
    """Whether a batch can become a nested tensor: False, so layers use dense tensors."""
    return False


def same_storage(tensor: torch.Tensor, source: torch.Tensor) -> bool:
    return (
        tensor.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
        and tensor.storage_offset() == source.storage_offset()
        and tensor.shape == source.shape
        and tensor.stride() == source.stride()
    )


KERNELS: Final[Mapping[str, Callable[..., Any]]] = {
    "aten::empty.memory_format": empty,
    "aten::empty_strided": empty_strided,
    "aten::full": full,
    "aten::_efficientzerotensor": zeros,
    "aten::fill_.Scalar": fill_,
    "aten::fill_.Tensor": fill_tensor_,
    "aten::zero_": zero_,
    "aten::copy_": copy_,
    "aten::_copy_from": copy_from,
    "aten::_copy_from_and_resize": copy_from_and_resize,
    "aten::_to_copy": to_copy,
    "aten::_amp_foreach_non_finite_check_and_unscale_": unscale,
    "aten::_local_scalar_dense": item,
    "aten::resize_": resize_,
    "aten::set_": set_,
    "aten::set_.source_Storage": set_storage,
    "aten::set_.source_Storage_storage_offset": set_storage_offset,
    "aten::set_.source_Tensor": set_tensor,
    "aten::_lazy_clone": lazy_clone,
    "aten::view.dtype": view_dtype,
    "aten::view_copy": view_copy,
    "aten::_unsafe_view": unsafe_view,
    "aten::histc": histc,
    "aten::record_stream": no_op,
    "aten::is_set_to": same_storage,
    "aten::_nested_tensor_from_mask_left_aligned": always_false,
    **BATCH_NORM,
    **DETERMINANTS,
    **SPARSE_GRADIENTS,
    **RECURRENT,
    **VIEWS,
}
"""By torch's name of the op."""

METADATA: Final = (
    "aten::view",
    "aten::as_strided",
    "aten::unfold",
    "aten::_reshape_alias",
    "aten::view_as_real",
    "aten::view_as_complex",
)
"""Ops whose CPU kernel changes only geometry."""

COMPOSITE: Final = frozenset(
    f"aten::{name}"
    for name in (
        "detach",
        "detach_",
        "alias",
        "lift",
        "lift_fresh",
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "rand_like",
        "randn_like",
        "randint_like",
        "new_empty",
        "new_empty_strided",
        "new_full",
        "new_zeros",
        "new_ones",
        "zeros",
        "ones",
        "empty_permuted",
        "empty.names",
        "scalar_tensor",
        "rand",
        "randn",
        "randint",
        "_pack_padded_sequence",
        "is_same_size",
        "is_pinned",
        "sparse_dim",
        "dense_dim",
        "_has_same_storage_numel",
        "_assert_scalar",
        "resize_as_",
        "_resize_output_",
        "_resize_output",
        "squeeze_",
        "unsqueeze_",
        "transpose_",
        "t_",
        "as_strided_",
        "swapaxes_",
        "swapdims_",
    )
)
"""Ops left to torch's composite kernels: they call other ops, or only touch metadata."""
