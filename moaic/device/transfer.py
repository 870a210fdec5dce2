"""Values between the host's memory and the accelerator."""

from __future__ import annotations

import torch

from moaic.device.handles import geometry_of, is_whole, place, view_of
from moaic.runtime import session


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor of the device, in memory of its own; waits, and raises what went wrong on a worker."""
    with torch.no_grad():
        return session.accelerator().download(view_of(tensor))


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the device with the values and the geometry of a host tensor."""
    dense = densely(tensor)
    made = geometry_of(dense)
    accelerator = session.accelerator()
    buffer = accelerator.buffer(made.name, made.shape, made.strides)
    accelerator.upload(buffer, dense)
    return place(made, buffer)


def densely(tensor: torch.Tensor) -> torch.Tensor:
    """A plain host tensor without gaps or overlaps, conjugation or negation; strides are kept where they can be."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    kept = torch.empty_like(plain, device="meta")
    return plain if kept.stride() == plain.stride() else plain.clone()


def overwrite(target: torch.Tensor, values: torch.Tensor) -> None:
    """Write host values over a tensor of the device; they are broadcast and converted as `copy_` does."""
    view = view_of(target)
    buffer = view.buffer
    accelerator = session.accelerator()
    if buffer.place is None and buffer.promise is None and is_whole(view):
        host = torch.empty_strided(view.shape, view.strides, dtype=target.dtype)
        host.copy_(values.detach())
        accelerator.upload(buffer, host)
        return
    source = to_device(values.detach().to(target.dtype))
    accelerator.launch("aten.copy_", (view, view_of(source)), {}, ())


