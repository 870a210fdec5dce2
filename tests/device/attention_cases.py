"""Drawn calls of attention: operands, masks and flags, with the result in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

Attend = Callable[..., Tensor]

attention: Attend = F.scaled_dot_product_attention

TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""Largest distances, relative to the largest element."""

Layout = Callable[[Tensor], Tensor]

LAYOUTS: Mapping[str, Layout] = {
    "rows": torch.Tensor.contiguous,
    "heads inside": lambda x: x.transpose(-3, -2).contiguous().transpose(-3, -2) if x.dim() > 2 else x,
    "columns": lambda x: x.mT.contiguous().mT,
    "every other column": lambda x: torch.stack((x, x), -1).flatten(-2)[..., ::2],
    "within more rows": lambda x: F.pad(x, (0, 0, 1, 2)).narrow(-2, 1, x.shape[-2]),
}
"""How the elements of a tensor may lie in memory."""

FLOATING = ("numbers", "hiding numbers", "float32 numbers")


@dataclass(frozen=True)
class Case:
    """One call, its numbers drawn from `seed`."""

    seed: int
    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    """Of query, key and value."""
    layouts: tuple[str, ...]
    mask: str = "none"
    """One of `FLOATING`, or "bool"."""
    mask_shape: tuple[int, ...] = ()
    mask_layout: str = "rows"
    learned: tuple[bool, ...] = (True, True, True, False)
    """Which of query, key, value and mask require gradients."""
    is_causal: bool = False
    scale: float | None = None
    grouped: bool = False
    dropout: float = 0.0

    def tensors(self) -> list[Tensor]:
        """Query, key, value and, if there is one, the mask; on the host."""
        generator = torch.Generator().manual_seed(self.seed)

        def drawn(shape: tuple[int, ...]) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        pairs = zip(self.shapes, self.layouts, strict=True)
        found = [LAYOUTS[layout](drawn(shape).to(self.dtype)) for shape, layout in pairs]
        if self.mask == "none":
            return found
        numbers, sees = drawn(self.mask_shape), drawn(self.mask_shape) > -0.3
        if self.mask == "hiding numbers":
            numbers = numbers.masked_fill(~sees, -math.inf)
        mask = sees if self.mask == "bool" else numbers.to(torch.float32 if "32" in self.mask else self.dtype)
        return [*found, LAYOUTS[self.mask_layout](mask) if mask.dim() > 1 else mask]

    def flags(self) -> dict[str, Any]:
        return {"is_causal": self.is_causal, "scale": self.scale, "enable_gqa": self.grouped}


@dataclass(frozen=True)
class Answer:
    """The output and the gradients of what requires one, or the error."""

    tensors: list[Tensor]
    error: type[Exception] | None = None


def answer(case: Case, tensors: list[Tensor], device: str, attend: Attend = attention) -> Answer:
    """What `attend` makes of these tensors there; gradients are of a sum with weights that differ."""
    # A tensor that moves keeps what it is, but not how it lies.
    moved = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x) for x in tensors]
    learned = (*case.learned[:3], case.learned[3] and moved[-1].is_floating_point())
    given = [x.requires_grad_(wanted) for x, wanted in zip(moved, learned, strict=False)]
    mask = given[3] if len(given) > 3 else None
    try:
        out = attend(*given[:3], mask, case.dropout, **case.flags())
    except (RuntimeError, IndexError) as error:
        return Answer([], type(error))
    wanted = [x for x in given if x.requires_grad]
    weights = torch.arange(out.numel()).reshape(out.shape).double().sin().to(out.dtype).to(device)
    grads = torch.autograd.grad(out, wanted, weights) if wanted and out.requires_grad else ()
    return Answer([out.detach(), *grads])


def by_definition(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    *,
    kept: Tensor | None = None,
    **flags: Any,
) -> Tensor:
    """Attention in float64; of the weights those are `kept`. A row that may see nothing is zeros."""
    query, key, value = query.double(), key.double(), value.double()
    scale = flags["scale"]
    if flags["enable_gqa"]:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    sees = torch.ones(scores.shape, dtype=torch.bool)
    if flags["is_causal"]:
        sees = sees.tril()
    if mask is not None and mask.dtype == torch.bool:
        sees = sees & mask
    elif mask is not None:
        sees = sees & (mask > -math.inf)
        scores = scores + mask.double().masked_fill(mask == -math.inf, 0.0)
    weights = scores.masked_fill(~sees, -math.inf).masked_fill(~sees.any(-1, keepdim=True), 0.0).softmax(-1) * sees
    return (weights if kept is None else weights * kept / (1 - dropout)) @ value


def check_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    apart = (found.double().cpu() - expected.double()).abs()
    room = tolerance * max(1.0, expected.abs().max().item()) if expected.numel() else 0.0
    assert bool((apart <= room).all()), f"off by {apart.max().item():.1e}, not by {room:.1e}"


def check(case: Case, attend: Attend = attention) -> None:
    """Of `attend` on the device: the results of float64, errors and layouts of the CPU."""
    tensors = case.tensors()
    found, beside = answer(case, tensors, "moai", attend), answer(case, tensors, "cpu")
    assert found.error is beside.error
    if found.error:
        return
    expected = answer(case, tensors, "cpu", by_definition)
    for one, other in zip(found.tensors, expected.tensors, strict=True):
        check_close(one, other, TOLERANCES[case.dtype])
    check_alike(found, beside)


def check_alike(found: Answer, beside: Answer) -> None:
    """Types, and how the output lies; gradients of operands without order of columns may lie otherwise."""
    assert [each.dtype for each in found.tensors] == [each.dtype for each in beside.tensors]
    if found.tensors[0].numel():
        assert strides(found.tensors[0]) == strides(beside.tensors[0])


def strides(tensor: Tensor) -> list[int]:
    """Of dims that have more than one element."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def check_dropout(case: Case, attend: Attend = attention) -> None:
    """Values of a unit matrix beside some numbers show which weights were kept."""
    query, key, _ = case.shapes
    unit = torch.eye(key[-2], dtype=case.dtype).expand(*key[:-2], -1, -1)
    query, key, value, *mask = case.tensors()
    tensors = [query, key, torch.cat((unit, value), -1), *mask]
    found = answer(case, tensors, "moai", attend)
    kept = found.tensors[0].cpu()[..., : unit.shape[-1]] != 0
    whole = by_definition(query, key, unit, mask[0] if mask else None, 0.0, **case.flags())
    assert not kept[whole == 0].any(), "what is hidden weighs nothing"
    check_share(kept[whole > 1e-4], case.dropout)

    expected = answer(case, tensors, "cpu", partial(by_definition, kept=kept))
    for one, other in zip(found.tensors, expected.tensors, strict=True):
        check_close(one, other, 2 * TOLERANCES[case.dtype])


def check_share(kept: Tensor, dropout: float) -> None:
    """Within six standard deviations."""
    count = kept.numel()
    assert abs(int(kept.sum()) - count * (1 - dropout)) <= 6 * (count * dropout * (1 - dropout)) ** 0.5


BATCHES = ((), (2,), (2,), (1,), (2, 3))

LENGTHS = ((5, 5), (3, 6), (6, 3), (1, 4), (1, 1), (8, 8))
"""Of queries and of keys."""


@st.composite
def shapes(
    draw: st.DrawFn, batch: tuple[int, ...], heads: tuple[int, int] | None, lengths: Sequence[tuple[int, int]]
) -> tuple[tuple[int, ...], ...]:
    """Of operands with so many heads of queries and of keys, or without heads."""
    rows, keys = draw(st.sampled_from(lengths))
    width, wide = draw(st.sampled_from([(4, 4), (8, 8), (16, 16), (1, 1), (4, 6), (8, 1)]))
    lead = batch if heads is None else (*batch, heads[0])
    fewer = batch if heads is None else (*batch, heads[1])
    return (*lead, rows, width), (*fewer, keys, width), (*fewer, keys, wide)


@st.composite
def cases(
    draw: st.DrawFn,
    batches: Sequence[tuple[int, ...]] = BATCHES,
    lengths: Sequence[tuple[int, int]] = LENGTHS,
) -> Case:
    """Of 2 to 5 dims, with masks that are broadcast along any of them."""
    batch = draw(st.sampled_from(batches))
    heads = draw(st.sampled_from([(4, 4), (2, 2), (1, 1), (4, 2), (4, 1)] + [None] * (not batch)))
    drawn = draw(shapes(batch, heads, lengths))
    mask = draw(st.sampled_from(["none", "none", "bool", "bool", *FLOATING]))
    full = [*drawn[0][:-1], drawn[1][-2]]
    sizes = full[-draw(st.integers(2, len(full))) :]
    layouts = st.sampled_from(list(LAYOUTS))
    is_causal = mask == "none" and draw(st.booleans())
    return Case(
        seed=draw(st.integers(0, 99)),
        dtype=draw(st.sampled_from(list(TOLERANCES))),
        shapes=drawn,
        layouts=tuple(draw(st.tuples(layouts, layouts, layouts))),
        mask=mask,
        mask_shape=tuple(size if draw(st.booleans()) else 1 for size in sizes),
        mask_layout=draw(layouts),
        learned=tuple(draw(st.lists(st.booleans(), min_size=4, max_size=4))),
        is_causal=is_causal,
        # The CPU's kernel lets a row see the future where a score is multiplied by less than nothing.
        scale=draw(st.sampled_from([None, None, 0.3, 2.0] + [-0.7] * (not is_causal))),
        grouped=heads is not None and (heads[0] != heads[1] and (heads[1] > 1 or draw(st.booleans()))),
    )


Shapes = tuple[tuple[int, ...], ...]

EMPTIED: Mapping[str, Callable[[Shapes], Shapes]] = {
    "nothing": lambda shapes: shapes,
    "rows": lambda shapes: (with_size(shapes[0], -2), *shapes[1:]),
    "keys": lambda shapes: (shapes[0], with_size(shapes[1], -2), with_size(shapes[2], -2)),
    "values": lambda shapes: (*shapes[:2], with_size(shapes[2], -1)),
}


def with_size(shape: tuple[int, ...], dim: int, size: int = 0) -> tuple[int, ...]:
    found = list(shape)
    found[dim] = size
    return tuple(found)


@st.composite
def spread(draw: st.DrawFn) -> Case:
    """Of operands that are broadcast against each other, or that have no elements."""
    case = draw(cases())
    query, key, value = case.shapes
    if draw(st.booleans()) and len(query) > 3:
        key = with_size(key, 0, 1)
    if draw(st.booleans()) and len(query) > 3:
        value = value[1:]
    shapes = EMPTIED[draw(st.sampled_from(list(EMPTIED)))]((query, key, value))
    return replace(case, shapes=shapes, mask="none", grouped=False)


def dropping(case: Case, dropout: float) -> Case:
    """`case` with dropout; small weights of short types are not told from those that were dropped."""
    return replace(case, dropout=dropout, dtype=torch.float32 if case.dtype.itemsize == 2 else case.dtype)


DROPPING = st.builds(dropping, cases(), st.sampled_from([0.1, 0.5, 0.9]))
