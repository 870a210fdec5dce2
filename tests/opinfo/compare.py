"""Comparison of values on the device with values on the CPU: copying them there, and their equality."""

from __future__ import annotations

import cmath
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.utils import _pytree as trees

MOAI: Final = torch.device("moai", 0)


class Differs(AssertionError):
    """A result that is not the CPU's."""


def carried(tree: Any) -> Any:
    """The same arguments on the device, each tensor with its strides, and anew a leaf where it asks for gradients."""
    return trees.tree_map(_carried, tree)


def copied(tree: Any) -> Any:
    """The same arguments once more on the CPU."""
    return trees.tree_map(_copied, tree)


def _copied(value: Any) -> Any:
    return _leaf(value, _laid(value)) if isinstance(value, torch.Tensor) else value


def _carried(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _leaf(value, _on_device(value))
    if isinstance(value, torch.device) or value == "cpu":
        return MOAI
    return value


def _leaf(given: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    return made.requires_grad_(given.requires_grad) if made.dtype.is_floating_point or made.is_complex() else made


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        return tensor.detach().to(MOAI)
    if tensor.is_contiguous():
        return tensor.detach().clone().to(MOAI)
    return _flat(tensor).to(MOAI).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _laid(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_contiguous():
        return tensor.detach().clone()
    return _flat(tensor).clone().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All that a tensor's storage holds."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((count,), (1,), 0)


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in trees.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def check(
    given: Any, wanted: Any, *, device: bool, values: bool = True, strides: bool = True, loose: bool = False
) -> None:
    """Raises Differs unless `given`, of the device, is what the CPU gave."""
    ours, theirs = trees.tree_leaves(given), trees.tree_leaves(wanted)
    if len(ours) != len(theirs):
        raise Differs(f"{len(ours)} results, not {len(theirs)}")
    for one, other in zip(ours, theirs, strict=True):
        for problem in _problems(one, other, device, values, strides, loose):
            raise Differs(problem)


def _equal(given: Any, wanted: Any) -> bool:
    """Of what is no tensor: plain values are equal, or both no number, or as near as rounding is."""
    if not isinstance(wanted, float | int | complex | str | torch.Size | torch.dtype | None) or given == wanted:
        return True
    if isinstance(wanted, float | complex):
        return cmath.isclose(given, wanted, rel_tol=1e-5) or (cmath.isnan(given) and cmath.isnan(wanted))
    return False


def _problems(given: Any, wanted: Any, device: bool, values: bool, strides: bool, loose: bool) -> Iterator[str]:
    if not isinstance(wanted, torch.Tensor):
        if values and not _equal(given, wanted):
            yield f"{given}, not {wanted}"
        return
    if not isinstance(given, torch.Tensor):
        yield f"{type(given).__name__}, not a tensor"
        return
    if device and given.device.type != "moai":
        yield f"on {given.device}"
    if (given.dtype, given.shape) != (wanted.dtype, wanted.shape):
        yield f"{given.dtype} {list(given.shape)}, not {wanted.dtype} {list(wanted.shape)}"
    elif strides and _steps(given) != _steps(wanted):
        yield f"strides {given.stride()} of {list(given.shape)}, not {wanted.stride()}"
    elif values:
        yield from _values(given.detach().cpu(), wanted.detach(), loose)


def _steps(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides, where they mean something."""
    if tensor.layout != torch.strided or tensor.numel() == 0:
        return ()
    return tuple(step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def _values(given: torch.Tensor, wanted: torch.Tensor, loose: bool) -> Iterator[str]:
    """The same up to rounding, which sums of large terms leave in small results: it is measured by the largest."""
    if wanted.is_floating_point() and wanted.element_size() == 1:
        # Beyond the range of eight bits PyTorch gives NaN or the largest number, as the operands' strides have it.
        beyond = wanted.isnan()
        given, wanted = given.float().masked_fill(beyond, 0), wanted.float().masked_fill(beyond, 0)
    rtol, atol = (1e-3, 1e-4) if loose else (1e-4, 1e-5)
    if wanted.is_floating_point() or wanted.is_complex():
        atol *= max(1.0, float(wanted.abs().nan_to_num(0, 0, 0).max()) if wanted.numel() else 0.0)
    try:
        torch.testing.assert_close(given, wanted, rtol=rtol, atol=atol, equal_nan=True, check_stride=False)
    except AssertionError as error:
        yield " ".join(str(error).split())
