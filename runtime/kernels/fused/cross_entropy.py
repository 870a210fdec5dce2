"""Cross entropy of a linear layer's output without logits in memory; the vocabulary may be sharded over ranks.

Each rank holds some rows of the weight and computes, for every token, four numbers of its part of the logits: `Parts`.
The parts of ranks, and of slices within a rank, merge into those of the whole vocabulary. The backward recomputes the
logits tile by tile, once for each of the two gradients, so there are five matrix products instead of three. A program
writes rows of a gradient that no other one writes, so the order of sums is fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl
from torch import Tensor

from moaic.runtime.kernels.triton_launch import Tile, TritonProgram, blocks, launch, rows_of

IGNORED: Final = -100
"""The label of a token without a loss."""


class Parts(NamedTuple):
    """Partial results of the loss over a part of the vocabulary; each f32, one per token."""

    peak: Tensor
    """The largest logit; -inf for an empty part."""
    total: Tensor
    """Sum of exp(logit - peak)."""
    target: Tensor
    """The label's logit; 0 if the label is in another part."""
    logits: Tensor
    """Sum of the logits, for label smoothing."""

    def logsumexp(self) -> Tensor:
        return self.peak + self.total.log()


def merged(parts: Sequence[Parts]) -> Parts:
    """The parts of the union of several. Over ranks this is one all-reduce by max, then one by sum."""
    peak, total, target, logits = (torch.stack(each) for each in zip(*parts, strict=True))
    highest = peak.amax(0)
    # An empty part has weight 0, even if all parts are empty (-inf - -inf).
    weight = torch.where(peak == -torch.inf, 0.0, (peak - highest).exp())
    return Parts(highest, (total * weight).sum(0), target.sum(0), logits.sum(0))


def losses(parts: Parts, labels: Tensor, classes: int, smoothing: float = 0.0) -> Tensor:
    """The loss of each token from the parts of all `classes`; 0 where the label is -100."""
    wanted = (1 - smoothing) * parts.target + smoothing / classes * parts.logits
    return torch.where(labels == IGNORED, 0.0, parts.logsumexp() - wanted)


def reference(
    x: Tensor, weight: Tensor, labels: Tensor, smoothing: float = 0.0, soft_cap: float | None = None
) -> Tensor:
    """The losses in plain PyTorch, one per token: x[T, D], weight[V, D], labels i64[T]."""
    logits = x @ weight.T
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    return F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing, ignore_index=IGNORED)


def forward(
    x: Tensor, weight: Tensor, labels: Tensor, tile: Tile, *, first: int = 0, soft_cap: float | None = None
) -> Parts:
    """The parts of a rank that holds weight[V, D], the classes from `first` on; x[T, D], global labels i64[T]."""
    x, weight = rows_of(x), rows_of(weight)
    tokens, classes = x.shape[0], weight.shape[0]
    slices = max(1, min(tile.programs, blocks(classes, tile.columns)))
    each = blocks(blocks(classes, tile.columns), slices) * tile.columns
    # Trailing slices without classes are not launched: their peaks stay -inf, so their weight is 0.
    peak = x.new_full((slices, tokens), -torch.inf, dtype=torch.float32)
    total, target, logits = x.new_zeros((3, slices, tokens), dtype=torch.float32)
    grid = (blocks(tokens, tile.rows), blocks(classes, each) if classes else 0)
    operands = (x, weight, labels.contiguous(), peak, total, target, logits)
    sizes = (x.stride(0), weight.stride(0), tokens, classes, x.shape[1], first, each)
    launch(_parts, grid, tile, *operands, *sizes, **_constants(tile, soft_cap))
    return merged([Parts(*each) for each in zip(peak, total, target, logits, strict=True)])


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    logsumexp: Tensor,
    tile: Tile,
    *,
    classes: int,
    first: int = 0,
    smoothing: float = 0.0,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of x, still to be summed over ranks, and of this rank's weight, in f32, from grad[T] of the losses.

    `logsumexp` and `classes` are of the whole vocabulary.
    """
    x, weight, labels = rows_of(x), rows_of(weight), labels.contiguous()
    # Ignored tokens have no gradient, whatever `grad` is.
    grad = torch.where(labels == IGNORED, 0.0, grad.float())
    made: list[Tensor] = []
    for own, other, tokens_own in ((x, weight, True), (weight, x, False)):
        result = torch.zeros(own.shape, dtype=torch.float32, device=own.device)
        grid = (blocks(own.shape[0], tile.rows if tokens_own else tile.columns),)
        operands = (own, other, result, labels, logsumexp.contiguous(), grad)
        sizes = (own.stride(0), other.stride(0), own.shape[0], other.shape[0], x.shape[1], first)
        constants = {"TOKENS_OWN": tokens_own, **_constants(tile, soft_cap)}
        launch(_gradient, grid, tile, *operands, *sizes, 1 - smoothing, smoothing / classes, **constants)
        made.append(result)
    return made[0], made[1]


def _constants(tile: Tile, soft_cap: float | None) -> dict[str, float | int]:
    cap = 0.0 if soft_cap is None else soft_cap
    return {"SOFT_CAP": cap, "TOKENS": tile.rows, "CLASSES": tile.columns, "DEPTH": tile.inner}


def programs(element: str, tile: Tile) -> tuple[TritonProgram, ...]:
    """The Triton programs for elements of this type."""
    sizes = {"width": "i32", "first": "i32"}
    forwards = {
        **dict.fromkeys(("x", "weight"), f"*{element}"),
        "labels": "*i64",
        **dict.fromkeys(("peak", "total", "target", "logits"), "*fp32"),
        **dict.fromkeys(("x_row", "weight_row", "tokens", "classes", "each"), "i32"),
        **sizes,
    }
    backwards = {
        **dict.fromkeys(("own", "other"), f"*{element}"),
        **dict.fromkeys(("result", "logsumexp", "grad"), "*fp32"),
        "labels": "*i64",
        **dict.fromkeys(("own_row", "other_row", "own_count", "other_count"), "i32"),
        **sizes,
        **dict.fromkeys(("on", "off"), "fp32"),
    }
    constants = _constants(tile, 30.0)
    owners = (TritonProgram(_gradient, backwards, {**constants, "TOKENS_OWN": own}) for own in (True, False))
    return TritonProgram(_parts, forwards, constants), *owners


@triton.jit
def _parts(
    x: tl.tensor,
    weight: tl.tensor,
    labels: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    target: tl.tensor,
    logits: tl.tensor,
    x_row: tl.tensor,
    weight_row: tl.tensor,
    tokens: tl.tensor,
    classes: tl.tensor,
    width: tl.tensor,
    first: tl.tensor,
    each: tl.tensor,
    SOFT_CAP: tl.constexpr,
    TOKENS: tl.constexpr,
    CLASSES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """The parts of some tokens over one slice of `each` classes, by an online softmax."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    label = tl.load(labels + token, mask=token < tokens, other=-1) - first
    begin = tl.program_id(1) * each
    end = tl.minimum(begin + each, classes)
    highest = tl.full([TOKENS], float("-inf"), tl.float32)
    summed = tl.zeros([TOKENS], tl.float32)
    found = tl.zeros([TOKENS], tl.float32)
    plain = tl.zeros([TOKENS], tl.float32)
    for start in range(begin, end, CLASSES):
        of = start + tl.arange(0, CLASSES)
        z = _capped(
            _product(x, weight, x_row, weight_row, token, of, tokens, end, width, TOKENS, CLASSES, DEPTH), SOFT_CAP
        )
        here = (of < end)[None, :]
        z = tl.where(here, z, float("-inf"))
        higher = tl.maximum(highest, tl.max(z, 1))
        summed = summed * tl.exp(highest - higher) + tl.sum(tl.exp(z - higher[:, None]), 1)
        found += tl.sum(tl.where(here & (of[None, :] == label[:, None]), z, 0.0), 1)
        plain += tl.sum(tl.where(here, z, 0.0), 1)
        highest = higher
    at = tl.program_id(1) * tokens + token
    tl.store(peak + at, highest, mask=token < tokens)
    tl.store(total + at, summed, mask=token < tokens)
    tl.store(target + at, found, mask=token < tokens)
    tl.store(logits + at, plain, mask=token < tokens)


@triton.jit
def _gradient(
    own: tl.tensor,
    other: tl.tensor,
    result: tl.tensor,
    labels: tl.tensor,
    logsumexp: tl.tensor,
    grad: tl.tensor,
    own_row: tl.tensor,
    other_row: tl.tensor,
    own_count: tl.tensor,
    other_count: tl.tensor,
    width: tl.tensor,
    first: tl.tensor,
    on: tl.tensor,
    off: tl.tensor,
    TOKENS_OWN: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    TOKENS: tl.constexpr,
    CLASSES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Rows of the gradient of x (`TOKENS_OWN`) or of the weight, which no other program writes."""
    OWN: tl.constexpr = TOKENS if TOKENS_OWN else CLASSES
    OTHER: tl.constexpr = CLASSES if TOKENS_OWN else TOKENS
    mine = tl.program_id(0) * OWN + tl.arange(0, OWN)
    for start in range(0, other_count, OTHER):  # pyright: ignore[reportArgumentType]  # Triton's meaning of range
        theirs = start + tl.arange(0, OTHER)
        if TOKENS_OWN:
            token = mine[:, None]
            of = theirs[None, :]
            known, is_class = token < own_count, of < other_count
        else:
            token = theirs[None, :]
            of = mine[:, None]
            known, is_class = token < other_count, of < own_count
        z = _capped(
            _product(own, other, own_row, other_row, mine, theirs, own_count, other_count, width, OWN, OTHER, DEPTH),
            SOFT_CAP,
        )
        # Tokens past the end have no gradient of their loss. Classes past the end multiply zeros, but may be infinite.
        above = tl.load(grad + token, mask=known, other=0.0)
        hit = of == tl.load(labels + token, mask=known, other=-1) - first
        delta = tl.exp(z - tl.load(logsumexp + token, mask=known, other=0.0)) - tl.where(hit, on, 0.0) - off
        if SOFT_CAP > 0:
            delta *= 1 - (z / SOFT_CAP) * (z / SOFT_CAP)
        delta = tl.where(is_class, delta * above, 0.0)
        _add_product(result, delta, other, other_row, mine, theirs, own_count, other_count, width, DEPTH)
        # The next iteration reads values that other threads of this program wrote.
        tl.debug_barrier()


@triton.jit
def _add_product(
    result: tl.tensor,
    delta: tl.tensor,
    other: tl.tensor,
    other_row: tl.tensor,
    mine: tl.tensor,
    theirs: tl.tensor,
    own_count: tl.tensor,
    other_count: tl.tensor,
    width: tl.tensor,
    DEPTH: tl.constexpr,
):
    """Add the product of `delta` and rows `theirs` of `other` to rows `mine` of the result."""
    for depth in range(0, width, DEPTH):  # pyright: ignore[reportArgumentType]  # Triton's meaning of range
        k = depth + tl.arange(0, DEPTH)
        at = mine.to(tl.int64)[:, None] * width + k[None, :]
        inside = (mine < own_count)[:, None] & (k < width)[None, :]
        source = theirs.to(tl.int64)[:, None] * other_row + k[None, :]
        rows = tl.load(other + source, mask=(theirs < other_count)[:, None] & (k < width)[None, :], other=0.0)
        so_far = tl.load(result + at, mask=inside, other=0.0)
        tl.store(result + at, tl.dot(delta.to(rows.dtype), rows, so_far, input_precision="ieee"), mask=inside)


@triton.jit
def _product(
    a: tl.tensor,
    b: tl.tensor,
    a_row: tl.tensor,
    b_row: tl.tensor,
    i: tl.tensor,
    j: tl.tensor,
    a_count: tl.tensor,
    b_count: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> tl.tensor:
    """The product of rows i of a and rows j of b; rows past the end are zero."""
    product = tl.zeros([ROWS, COLUMNS], tl.float32)
    for depth in range(0, width, DEPTH):
        k = depth + tl.arange(0, DEPTH)
        left = a + i.to(tl.int64)[:, None] * a_row + k[None, :]
        right = b + j.to(tl.int64)[None, :] * b_row + k[:, None]
        rows = tl.load(left, mask=(i < a_count)[:, None] & (k < width)[None, :], other=0.0)
        columns = tl.load(right, mask=(j < b_count)[None, :] & (k < width)[:, None], other=0.0)
        product = tl.dot(rows, columns, product, input_precision="ieee")
    return product


@triton.jit
def _capped(z: tl.tensor, SOFT_CAP: tl.constexpr) -> tl.tensor:
    """The logits, or SOFT_CAP * tanh(z / SOFT_CAP)."""
    if SOFT_CAP > 0:
        z = SOFT_CAP * (2 * tl.sigmoid(2 * z / SOFT_CAP) - 1)
    return z
