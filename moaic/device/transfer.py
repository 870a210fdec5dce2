"""Values between the host's memory and the accelerator."""

from __future__ import annotations

import torch

from moaic.device.handles import extent, geometry_of, new_tensor, place, view_of
from moaic.runtime.controller import session


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor of the device, in memory of its own; waits, and raises what went wrong on a worker."""
    return session.accelerator().download(view_of(plain(tensor)))


def laid_out(values: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """A host tensor with other strides: what an op draws or gives follows the order of its operand's memory."""
    if values.stride() == strides or not values.numel():
        return values
    size = extent(values.shape, strides)
    places = torch.arange(size, device="cpu").as_strided(values.shape, strides).flatten()
    storage = torch.empty(size, 1, dtype=values.dtype, device="cpu")
    # As bytes, since no op puts elements of every type.
    storage.view(torch.uint8)[places] = values.reshape(-1, 1).view(torch.uint8)
    return storage.as_strided(values.shape, strides)


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


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the device with lazy conjugation and negation carried out, which its buffer knows nothing of."""
    done = tensor
    for is_lazy, op in ((tensor.is_conj(), "aten.conj_physical"), (tensor.is_neg(), "aten.neg")):
        if is_lazy:
            source, done = view_of(done), new_tensor(geometry_of(torch.empty_like(done, device="meta")))
            session.accelerator().launch(op, (source,), {}, (view_of(done).buffer,))
    return done
