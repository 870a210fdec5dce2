"""Registers the kernels at the first use of the device."""

from __future__ import annotations

import os
import re
from functools import cache, partial
from typing import Any, Final

import torch

from moaic.device import (
    attention,
    autocast,
    cpu_fallback,
    generic_kernels,
    native_kernels,
    recurrent_layers,
    sparse_gradients,
    torch_patches,
    torch_private,
)
from moaic.device.handles import is_ours
from moaic.device.transfer import resolved, to_device
from moaic.runtime.protocol.aten_schema import Signature, signature_of
from moaic.support import excepthook, logging_setup

_SKIPPED: Final = re.compile("sparse|(?<!fake_)quantize|::_?q_|mkldnn|cudnn|miopen|nested|mps|fbgemm|jagged")
"""Ops that are never called with tensors of the device."""

_MAKING_SPARSE: Final = frozenset(
    f"aten::_sparse_{layout}_tensor_unsafe" for layout in ("compressed", "coo", "csr", "csc", "bsr", "bsc")
)
"""Ops that construct sparse tensors: PyTorch would make them of tensors of the device, and then have no op for them."""

_INDEXING: Final = frozenset(
    f"aten::{name}" for name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
)

_LAZILY_CONJUGATED: Final = frozenset(
    f"aten::{name}"
    for name in (
        "clone",
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "dot",
        "vdot",
        "conj_physical",
        "_conj_physical",
        "linalg_svd",
        "_linalg_svd",
        "linalg_solve_triangular",
        "triangular_solve",
    )
)
"""Ops to which torch passes lazily conjugated or negated tensors."""


@cache
def start() -> None:
    """Register kernels and patches. Workers start later, with the first command."""
    excepthook.install()
    logging_setup.install(os.environ)
    registry = torch_private.Registry("aten", "PrivateUse1")
    for name in torch_private.aten_ops():
        kernel = _kernel(name)
        if kernel is not None:
            registry.add(name, kernel)
    torch_private.Registry("_", "PrivateUse1").fall_back(_unknown)
    for key in torch_private.SPARSE_KEYS:
        torch_private.Registry("_", key).fall_back(_sparse)
    torch_private.Registry("_", torch_private.NESTED_KEY).fall_back(_nested)
    attention.install()
    recurrent_layers.install()
    autocast.install()
    sparse_gradients.install()
    torch_patches.install_in_use()


def _kernel(name: str) -> Any:
    """The kernel of an aten op; None for an op that torch composes of others."""
    if name in native_kernels.KERNELS:
        return native_kernels.KERNELS[name]
    if name in native_kernels.METADATA:
        return torch_private.metadata_kernel(torch_private.overload_of(name))
    packet = name.partition(".")[0]
    if packet in _MAKING_SPARSE:
        return partial(_sparse, name)
    if packet in native_kernels.COMPOSITE or _SKIPPED.search(packet):
        return None
    if torch_private.has_kernel(name, "CompositeImplicitAutograd") or torch_private.gives_views(name):
        return None
    return _on_first_call(name)


def _on_first_call(name: str) -> Any:
    """A kernel that is built at its first call: a program uses a few dozen of two thousand."""
    built: list[Any] = []

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not built:
            built.append(_build(name))
        return built[0](*args, **kwargs)

    return kernel


def _build(name: str) -> Any:
    signature = signature_of(torch_private.overload_of(name))
    sees = cpu_fallback.must_see_values(signature) and signature.name != "aten.index.Tensor"
    if sees or signature.is_random:
        return cpu_fallback.kernel(signature)
    kernel = _generic(signature)
    packet = name.partition(".")[0]
    if packet in _INDEXING:
        return _indexing(kernel)
    if packet == "aten::convolution":
        return _recorded_by_jit(kernel)
    return _resolving(kernel) if packet in _LAZILY_CONJUGATED else kernel


def _generic(signature: Signature) -> Any:
    if not signature.written:
        return generic_kernels.functional(signature)
    if signature.has_lists and not signature.returns:
        return generic_kernels.writing(signature)
    return generic_kernels.mutating(signature)


def _indexing(kernel: Any) -> Any:
    """Accept indices on the host, as other devices do."""

    def with_indices(tensor: Any, indices: Any, *args: Any, **kwargs: Any) -> Any:
        there = [index if index is None or is_ours(index) else to_device(index) for index in indices]
        return kernel(tensor, there, *args, **kwargs)

    return with_indices


def _recorded_by_jit(convolution: Any) -> Any:
    """`torch.jit.trace` records the op that convolution is made of for other devices, not convolution itself."""

    def convolve(*args: Any) -> Any:
        if torch_private.is_recorded_by_jit():
            is_benchmark, is_deterministic, with_cudnn, with_tf32 = False, False, True, True
            return torch.ops.aten._convolution(*args, is_benchmark, is_deterministic, with_cudnn, with_tf32)
        return convolution(*args)

    return convolve


def _resolving(kernel: Any) -> Any:
    def without_lazy_bits(value: Any) -> Any:
        lazy = isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg())
        return resolved(value) if lazy else value

    def on_plain(*args: Any, **kwargs: Any) -> Any:
        return kernel(*(without_lazy_bits(value) for value in args), **kwargs)

    return on_plain


def _sparse(overload: Any, *_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        f"device moai holds dense tensors only, and {overload} makes or reads a sparse one: "
        "keep it on the cpu, or move its to_dense()"
    )


def _nested(overload: Any, *_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        f"device moai holds no nested tensors of strided parts, which {overload} makes or reads: "
        "make them with layout=torch.jagged"
    )


def _unknown(overload: Any, *args: Any, **kwargs: Any) -> Any:
    """An op of another library: its CPU kernel, if any, runs on the host."""
    if "sparse" in str(overload):
        _sparse(overload)
    if overload.namespace == "aten":
        raise NotImplementedError(f"{overload} is not available on device moai")
    return cpu_fallback.run(signature_of(overload), args, kwargs)
