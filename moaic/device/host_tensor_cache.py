"""Tensors of the host on the accelerator. What a model holds is mirrored: sent anew only when its values have changed.

The version that torch counts tells of most changes; writes through `.data` or by other means it does not see. So what
was sent is kept, and a tensor whose version is the same is compared with it, which costs a fraction of sending it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moaic.device.handles import dtype_name
from moaic.runtime.controller.accelerator import Accelerator
from moaic.runtime.controller.buffer import Buffer, row_major


@dataclass(slots=True)
class Mirror:
    """A tensor of the host as the accelerator has it."""

    accelerator: Accelerator
    buffer: Buffer
    version: int
    sent: Tensor


def uploaded(accelerator: Accelerator, tensor: Tensor) -> Buffer:
    """A new buffer with the value of a tensor of the host, contiguous."""
    buffer = _buffer_for(accelerator, tensor)
    accelerator.upload(buffer, tensor.detach().contiguous())
    return buffer


def mirrored(accelerator: Accelerator, tensor: Tensor) -> Buffer:
    """The buffer that mirrors a tensor of the host, up to date. It lasts as long as the tensor's storage."""
    storage: Any = tensor.untyped_storage()
    mirrors: dict[Any, Mirror] = storage.__dict__.setdefault("moai_mirrors", {})
    key = (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())
    mirror = mirrors.get(key)
    if mirror is None or mirror.accelerator is not accelerator:
        buffer = _buffer_for(accelerator, tensor)
    elif mirror.version == _version(tensor) and same_bits(mirror.sent, tensor.detach()):
        return mirror.buffer
    else:
        buffer = mirror.buffer
    sent = tensor.detach().clone(memory_format=torch.contiguous_format)
    accelerator.upload(buffer, sent, is_kept=True)
    mirrors[key] = Mirror(accelerator, buffer, _version(tensor), sent)
    return buffer


def _version(tensor: Tensor) -> int:
    """How often torch has seen the tensor written; it does not count for tensors made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def _buffer_for(accelerator: Accelerator, tensor: Tensor) -> Buffer:
    shape = tuple(tensor.shape)
    return accelerator.buffer(dtype_name(tensor.dtype), shape, row_major(shape))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one type and shape hold the same bits: a NaN equals itself, and 0 is not -0."""
    left, right = one.contiguous().view(-1), other.contiguous().view(-1)
    ends = (left.nbytes, *(tensor.storage_offset() * tensor.itemsize for tensor in (left, right)))
    word = next(word for word in _WORDS if all(end % word.itemsize == 0 for end in ends))
    return torch.equal(left.view(word), right.view(word))


_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
