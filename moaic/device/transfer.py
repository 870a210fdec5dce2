"""Transfers between the host's memory and the accelerator."""

from __future__ import annotations

import torch

from moaic.device.handles import extent, full_tensor, geometry_of, new_tensor, view_of
from moaic.runtime.controller import session


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor of the device in a new host tensor; waits, and raises the error of a failed worker."""
    return session.accelerator().download(view_of(resolved(tensor)))


def with_strides(values: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """A host tensor with other strides: results of ops follow the memory order of their operands."""
    if values.stride() == strides or not values.numel():
        return values
    size = extent(values.shape, strides)
    places = torch.arange(size, device="cpu").as_strided(values.shape, strides).flatten()
    storage = torch.empty(size, 1, dtype=values.dtype, device="cpu")
    # As bytes, since `index_put_` does not support each element type.
    storage.view(torch.uint8)[places] = values.reshape(-1, 1).view(torch.uint8)
    return storage.as_strided(values.shape, strides)


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the device with the values and the geometry of a host tensor."""
    dense = as_dense(tensor)
    geometry = geometry_of(dense)
    accelerator = session.accelerator()
    buffer = accelerator.buffer(geometry.name, geometry.shape, geometry.strides)
    accelerator.upload(buffer, dense)
    return full_tensor(geometry, buffer)


def as_dense(tensor: torch.Tensor) -> torch.Tensor:
    """A dense host tensor without lazy conjugation or negation; strides are kept where possible."""
    resolved = tensor.detach().resolve_conj().resolve_neg()
    kept = torch.empty_like(resolved, device="meta")
    return resolved if kept.stride() == resolved.stride() else resolved.clone()


def overwrite(target: torch.Tensor, values: torch.Tensor) -> None:
    """Overwrite a tensor of the device with host values, broadcast and converted as by `copy_`."""
    view = view_of(target)
    accelerator = session.accelerator()
    given = values.detach().resolve_conj().resolve_neg()
    if view.is_whole:
        host = given
        if host.dtype != target.dtype or host.shape != target.shape:
            host = torch.empty(view.shape, dtype=target.dtype, device="cpu").copy_(given)
        accelerator.upload(view.buffer, host)
        return
    source = to_device(given.to(target.dtype))
    accelerator.launch("aten.copy_", (view, view_of(source)), {}, ())


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the device with lazy conjugation and negation done, which buffers do not record."""
    done = tensor
    for is_lazy, op in ((tensor.is_conj(), "aten.conj_physical"), (tensor.is_neg(), "aten.neg")):
        if is_lazy:
            source, done = view_of(done), new_tensor(geometry_of(torch.empty_like(done, device="meta")))
            session.accelerator().launch(op, (source,), {}, (view_of(done).buffer,))
    return done
