"""Programs of views and writes as data, and a machine that runs one on any device.

A step is an op's name and four numbers: the indices of two tensors, and two arguments of the op. An op returns a new
tensor or writes into an existing one; an invalid step raises on every device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

Step = tuple[str, int, int, int, int]
Op = Callable[[Any, Any, int, int], Any]
"""The tensor, the other one, and two numbers; gives a new tensor, or anything else where it writes."""

DTYPES: Final = (
    torch.float32,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.bfloat16,
)
SHAPES: Final = ((4,), (3, 4), (2, 3, 4), (), (1, 4), (0, 2), (2, 2), (2, 3, 2, 2))

LARGEST: Final = 200
"""Elements; a program lets go of a tensor that has more."""


def _dim(x: Tensor, number: int) -> int:
    return number % max(1, x.dim())


def _mask(x: Tensor, number: int) -> Tensor:
    """Which elements to write, drawn by their place."""
    places = torch.arange(x.numel(), device=x.device).view(x.shape)
    return places % (2 + number % 3) == 0


def _strided(x: Tensor, a: int, b: int) -> Tensor:
    shape = ((2,), (2, 2), (1, 3), (3,))[a % 4]
    strides = ((1, 1), (2, 1), (0, 1), (1, 2))[b % 4][: len(shape)]
    return x.as_strided(shape, strides, x.storage_offset() + b % 2)


def _order(x: Tensor, number: int) -> list[int]:
    dims = list(range(x.dim()))
    shift = number % max(1, x.dim())
    return dims[shift:] + dims[:shift]


def _index(x: Tensor, number: int) -> Tensor:
    return torch.tensor([number % max(1, x.size(0)), 0], device=x.device)


def _set_data(x: Tensor, y: Tensor) -> None:
    if any(each.is_conj() or each.is_neg() for each in (x, y)):
        raise TypeError("PyTorch has that for its own devices alone")
    x.data = y


def _reshaped(x: Tensor) -> tuple[int, ...]:
    return (x.shape[0] * x.shape[1], *x.shape[2:]) if x.dim() > 1 else (-1, 1)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


VIEWS: Final[Mapping[str, Op]] = {
    "select": lambda x, _, a, b: x.select(_dim(x, a), b),
    "slice": lambda x, _, a, b: x[a % 3 :: 1 + b % 3],
    "slice last": lambda x, _, a, b: x[..., a % 3 :: 1 + b % 2],
    "narrow": lambda x, _, a, b: x.narrow(_dim(x, a), b % 2, 1),
    "transpose": lambda x, _, a, b: x.transpose(_dim(x, a), _dim(x, b)),
    "permute": lambda x, _, a, b: x.permute(_order(x, a)),
    "view": lambda x, _, a, b: x.view(_reshaped(x)),
    "reshape": lambda x, _, a, b: x.reshape(-1),
    "expand": lambda x, _, a, b: x.expand(2, *x.shape),
    "expand dim": lambda x, _, a, b: x.unsqueeze(_dim(x, a)).expand(*x.shape[: _dim(x, a)], 3, *x.shape[_dim(x, a) :]),
    "unsqueeze": lambda x, _, a, b: x.unsqueeze(_dim(x, a)),
    "squeeze": lambda x, _, a, b: x.squeeze(),
    "diagonal": lambda x, _, a, b: x.diagonal(),
    "unfold": lambda x, _, a, b: x.unfold(_dim(x, a), 2, 1 + b % 2),
    "as_strided": lambda x, _, a, b: _strided(x, a, b),
    "view dtype": lambda x, _, a, b: x.view(DTYPES[a % len(DTYPES)]),
    "as real": lambda x, _, a, b: torch.view_as_real(x),
    "as complex": lambda x, _, a, b: torch.view_as_complex(x),
    "real": lambda x, _, a, b: x.real,
    "imag": lambda x, _, a, b: x.imag,
    "conj": lambda x, _, a, b: x.conj(),
    "neg view": lambda x, _, a, b: torch.ops.aten._neg_view(x if x.dtype != torch.bool else x.abs()),
    "detach": lambda x, _, a, b: x.detach(),
    "data": lambda x, _, a, b: x.data,
    "chunk": lambda x, _, a, b: x.chunk(2, _dim(x, a))[b % 2],
    "split": lambda x, _, a, b: x.split(1 + b % 2, _dim(x, a))[-1],
    "unbind": lambda x, _, a, b: x.unbind(_dim(x, a))[b % 2],
    "set": lambda x, _, a, b: torch.empty(0, dtype=x.dtype, device=x.device).set_(x),
    "set storage": lambda x, _, a, b: torch.empty(0, dtype=DTYPES[a % 5], device=x.device).set_(x.untyped_storage()),
}

COPIES: Final[Mapping[str, Op]] = {
    "clone": lambda x, _, a, b: x.clone(),
    "contiguous": lambda x, _, a, b: x.contiguous(),
    "channels last": lambda x, _, a, b: _channels_last(x),
    "flip": lambda x, _, a, b: x.flip(_dim(x, a)),
    "roll": lambda x, _, a, b: x.roll(1),
    "to": lambda x, _, a, b: x.to(DTYPES[a % len(DTYPES)]),
    "add": lambda x, y, a, b: x + y,
    "mul": lambda x, _, a, b: x * (1 + a % 2),
    "sum": lambda x, _, a, b: x.sum(_dim(x, a)),
    "cat": lambda x, y, a, b: torch.cat([x, y]),
    "index": lambda x, _, a, b: x[_index(x, a)],
    "select by mask": lambda x, _, a, b: x[_mask(x, a)],
    "empty like": lambda x, _, a, b: torch.zeros_like(x),
    "resolve": lambda x, _, a, b: x.resolve_conj().resolve_neg(),
    "deepcopy": lambda x, _, a, b: copy.deepcopy(x),
    "view copy": lambda x, _, a, b: torch.view_copy(x, _reshaped(x)),
    "host": lambda x, _, a, b: x.contiguous().cpu().clone().to(x.device),
    "where": lambda x, y, a, b: torch.where(_mask(x, a), x, y),
}

WRITES: Final[Mapping[str, Op]] = {
    "fill": lambda x, _, a, b: x.fill_(a),
    "zero": lambda x, _, a, b: x.zero_(),
    "fill complex": lambda x, _, a, b: x.fill_(complex(a, b)),
    "fill from": lambda x, y, a, b: x.fill_(y.reshape(-1)[0]),
    "fill from itself": lambda x, _, a, b: x.fill_(x.reshape(-1)[-1]),
    "add number": lambda x, _, a, b: x.add_(a),
    "add fraction": lambda x, _, a, b: x.add_(0.5),
    "add": lambda x, y, a, b: x.add_(y),
    "add to itself": lambda x, _, a, b: x.add_(x),
    "mul": lambda x, y, a, b: x.mul_(y),
    "mul number": lambda x, _, a, b: x.mul_(2),
    "copy": lambda x, y, a, b: x.copy_(y),
    "copy from host": lambda x, y, a, b: x.copy_(torch.arange(x.numel()).view(x.shape)),
    "copy shifted": lambda x, _, a, b: x[1:].copy_(x[:-1]),
    "copy reversed": lambda x, _, a, b: x.copy_(x.flip(_dim(x, a))),
    "neg": lambda x, _, a, b: x.neg_(),
    "abs": lambda x, _, a, b: x.abs_(),
    "clamp": lambda x, _, a, b: x.clamp_(-1, 1 + a),
    "turn": lambda x, _, a, b: x.mul_(1j),
    "greater": lambda x, y, a, b: x.gt_(y),
    "logical": lambda x, _, a, b: x.logical_not_(),
    "assign": lambda x, _, a, b: x.__setitem__(a % 3, b),
    # PyTorch fills from a value without dims that is the CPU's, and copies every other, which may not overlap.
    "assign slice": lambda x, y, a, b: x.__setitem__(slice(a % 2, None, 2), y if y.dim() else y.clone()),
    "assign by mask": lambda x, _, a, b: x.__setitem__(_mask(x, a), b),
    "assign by index": lambda x, _, a, b: x.__setitem__(_index(x, a), b),
    "masked fill": lambda x, _, a, b: x.masked_fill_(_mask(x, a), b),
    "masked scatter": lambda x, y, a, b: x.masked_scatter_(_mask(x, a), y),
    "index fill": lambda x, _, a, b: x.index_fill_(0, _index(x, a), b),
    "index add": lambda x, y, a, b: x.index_add_(0, _index(x, a)[:1], y[:1]),
    "index copy": lambda x, y, a, b: x.index_copy_(0, _index(x, a)[:1], y[:1]),
    "index put": lambda x, y, a, b: x.index_put_((_index(x, a),), y[:1], accumulate=True),
    "scatter": lambda x, _, a, b: x.scatter_(0, torch.zeros(x.shape, dtype=torch.int64, device=x.device), b),
    "put": lambda x, y, a, b: x.put_(_index(x, 0), y.reshape(-1)[:2]),
    "fill diagonal": lambda x, _, a, b: x.fill_diagonal_(b),
    "cumulate": lambda x, _, a, b: x.cumsum_(_dim(x, a)),
    "lower triangle": lambda x, _, a, b: x.tril_(),
    "swap dims": lambda x, _, a, b: x.transpose_(_dim(x, a), _dim(x, b)),
    "squeeze": lambda x, _, a, b: x.squeeze_(),
    "unsqueeze": lambda x, _, a, b: x.unsqueeze_(0),
    "stride": lambda x, _, a, b: x.as_strided_((2,), (1,), b % 2),
    "out": lambda x, y, a, b: torch.add(x, y, out=x),
    "out elsewhere": lambda x, y, a, b: torch.mul(x.clone(), 2, out=y),
    "out of a matrix": lambda x, y, a, b: torch.mm(x, y, out=x),
    "out of a sum": lambda x, y, a, b: torch.sum(x.clone(), 0, out=y),
    "out of cat": lambda x, y, a, b: torch.cat([x.clone()] * 2, out=y),
    "out of a list": lambda x, y, a, b: torch.max(
        x.clone(), 0, out=(y, torch.empty(0, dtype=torch.int64, device=x.device))
    ),
    "resize": lambda x, _, a, b: x.resize_(1 + a % 2, 1 + b % 2).fill_(b),
    "set": lambda x, y, a, b: x.set_(y),
    "set data": lambda x, y, a, b: _set_data(x, y),
    "foreach": lambda x, y, a, b: torch.ops.aten._foreach_add_.Scalar([x], 1),
    "lerp": lambda x, y, a, b: x.lerp_(y, 0.5),
    "addcmul": lambda x, y, a, b: x.addcmul_(y, y),
    "sort": lambda x, _, a, b: x.copy_(x.sort(0).values),
}

OPS: Final[Mapping[str, Op]] = {
    **{f"view: {name}": op for name, op in VIEWS.items()},
    **{f"copy: {name}": op for name, op in COPIES.items()},
    **{f"write: {name}": op for name, op in WRITES.items()},
}


def first(shape: int, dtype: int, device: str) -> Tensor:
    """What a program begins with."""
    size = SHAPES[shape % len(SHAPES)]
    host = torch.arange(1, 1 + torch.Size(size).numel(), device="cpu").view(size)
    return host.to(DTYPES[dtype % len(DTYPES)]).to(device)


def run(step: Step, tensors: list[Tensor]) -> str | None:
    """Do a step; what was raised, in one word, if anything was."""
    name, at, other, a, b = step
    x, y = tensors[at % len(tensors)], tensors[other % len(tensors)]
    try:
        made: Any = OPS[name](x, y, a, b)
    except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError) as error:
        return str(error)
    if not name.startswith("write") and made.numel() <= LARGEST:
        tensors.append(made)
    return None


def differences(expected: Sequence[Tensor], found: Sequence[Tensor]) -> list[str]:
    """What is not the same of two lists of tensors, in words."""
    return [
        f"tensor {number}: {fault}"
        for number, pair in enumerate(zip(expected, found, strict=True))
        if (fault := _difference(*pair))
    ]


def _difference(expected: Tensor, found: Tensor) -> str | None:
    for what, ask in _ASKED.items():
        if ask(expected) != ask(found):
            return f"{what} {ask(found)}, not {ask(expected)}"
    there = found.cpu()
    if not torch.equal(there.isnan(), expected.isnan()) or not torch.equal(there.nan_to_num(1), expected.nan_to_num(1)):
        return f"values {there.tolist()}, not {expected.tolist()}"
    return None


_ASKED: Final[Mapping[str, Callable[[Any], Any]]] = {
    "dtype": lambda x: x.dtype,
    "shape": lambda x: x.shape,
    "strides": lambda x: [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1 and x.numel()],
    # A view of a tensor without elements begins where its strides say, and those are free.
    "offset": lambda x: x.storage_offset() if x.numel() else 0,
    "conjugation": lambda x: x.is_conj(),
    "negation": lambda x: x.is_neg(),
    "version": lambda x: x._version,
}
