"""Ring attention on a worker: each turn attends to one block of keys while the next block is received.

A turn is the same op as attention on one device, so its softmax covers only the keys of its block. A forward sums the
results of turns, weighted by exp(logsumexp - largest logsumexp so far), and divides by the sum of weights once at the
end. Rows whose scores are all the lowest number therefore get the result of one device, although their logsumexp does
not tell the number of keys. A backward starts from the result and the logsumexp over all keys, so the gradients of its
turns are plain sums: the query's stays on this rank, those of keys and values travel with their block, in the order of
ranks independent of timing. Types narrower than float32 are summed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from moaic.ir.attention import ATTENTION, is_causal
from moaic.ir.graph import Op
from moaic.ir.op_names import RING
from moaic.ir.ring_attention import attention_of, is_striped
from moaic.runtime.codegen.lower_to_fx import run_op
from moaic.runtime.comm.reshard import RankContext, dense
from moaic.runtime.comm.transport import Group
from moaic.runtime.kernels.dispatch import tile_where_it_wins
from moaic.runtime.kernels.online_softmax import merged


@dataclass(frozen=True, slots=True)
class _Ring:
    """One rank's side of a ring."""

    op: Op
    rank_context: RankContext
    group: Group
    mask: Tensor | None
    """The mask of this rank's rows, with the columns of all keys."""

    def sources(self) -> Iterator[int]:
        """The rank whose block this rank has at each turn: its own first, then backwards."""
        return ((self.group.index - turn) % self.group.size for turn in range(self.group.size))

    def passed(self, *tensors: Tensor) -> Callable[[], list[Tensor]]:
        """Begin to send tensors to the next rank; the returned function waits for those of the previous rank."""
        return self.rank_context.transport.begin_pass(tensors, self.group)

    def turn(self, source: int, rows: int) -> Turn | None:
        """The turn of `rows` rows with the block of rank `source`; None if no row sees a key of it."""
        attention, causal, is_later = attention_of(self.op), is_causal(self.op), source > self.group.index
        if causal and is_later and (rows == 1 or not is_striped(self.op)):
            return None
        flag = causal and (source == self.group.index or is_striped(self.op))
        op = Op(attention.name, attrs={**attention.attrs, "is_causal": flag})
        return Turn(op, self.rank_context.context.device, self._columns(source), int(causal and is_later))

    def _columns(self, source: int) -> Tensor | None:
        """The columns of the mask for the block of one rank."""
        if self.mask is None or self.mask.shape[-1] == 1:
            return self.mask
        if is_striped(self.op):
            return self.mask[..., source :: self.group.size]
        count = self.mask.shape[-1] // self.group.size
        return self.mask.narrow(-1, source * count, count)


@dataclass(frozen=True, slots=True)
class Turn:
    """This rank's rows and one block of keys.

    With striped causal attention, row i sees keys 0 to i of a block from the same or an earlier rank, but only 0 to i-1
    of a block from a later rank. The latter is a causal call without the first row and the last key:

        rows  0 1 2 3  x  keys 0 1 2 3, later rank   ->   rows 1 2 3  x  keys 0 1 2, causal
    """

    op: Op
    device: torch.device
    columns: Tensor | None
    skipped: int
    """Number of first rows without visible keys, and of last keys that no row sees."""

    def rows(self, tensor: Tensor) -> Tensor:
        return tensor.narrow(2, self.skipped, tensor.shape[2] - self.skipped)

    def keys(self, tensor: Tensor) -> Tensor:
        return tensor.narrow(2, 0, tensor.shape[2] - self.skipped)

    def forward(self, query: Tensor, block: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The result of `rows` and its logsumexp."""
        out, logsumexp = run_op(self.op, [self.rows(query), *map(self.keys, block), self._mask()], self.device)
        return out, logsumexp

    def backward(self, of_rows: Sequence[Tensor], block: Sequence[Tensor], logsumexp: Tensor) -> Sequence[Tensor]:
        """The gradients of the query for `rows`, and of keys and values for `keys`."""
        grad, query, out = map(self.rows, of_rows)
        block = [self.keys(each) for each in block]
        return run_op(self.op, [grad, query, *block, out, dense(self.rows(logsumexp)), self._mask()], self.device)

    def known(self, logsumexp: Tensor) -> Tensor:
        """The logsumexp of this turn, set to -inf for rows without visible keys: some kernels return other values."""
        mask = self._mask()
        if mask is None:
            return logsumexp
        seen = mask if mask.dtype == torch.bool else mask > -inf
        if is_causal(self.op):
            rows = logsumexp.shape[-1]
            seen = seen & torch.ones(rows, rows, dtype=torch.bool, device=mask.device).tril()
        return torch.where(seen.any(-1), logsumexp, -inf)

    def _mask(self) -> Tensor | None:
        """The mask of `rows` and `keys`."""
        mask = self.columns
        if mask is None:
            return None
        for dim, first, rest in ((-2, self.skipped, 0), (-1, 0, self.skipped)):
            if -dim <= mask.dim() and mask.shape[dim] > 1:
                mask = mask.narrow(dim, first, mask.shape[dim] - first - rest)
        return dense(mask)


def ring_attention(op: Op, rank_context: RankContext) -> Callable[[list[Tensor]], list[Tensor]]:
    """A rank's side of ring attention, from its local operands to its local results."""
    group, count = rank_context.group(str(op.attrs["axis"])), ATTENTION[attention_of(op).name]
    run = _forward if op.name == RING else _backward

    def of_operands(inputs: list[Tensor]) -> list[Tensor]:
        return run(_Ring(op, rank_context, group, inputs[count] if len(inputs) > count else None), *inputs[:count])

    return of_operands


def _forward(ring: _Ring, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    block = [dense(key), dense(value)]
    total: Total | None = None
    for number, source in enumerate(ring.sources(), 1):
        coming = ring.passed(*block) if number < ring.group.size else None
        if turn := ring.turn(source, query.shape[2]):
            out, logsumexp = turn.forward(query, block)
            if total is None:
                total = Total.of(out, logsumexp, turn.known(logsumexp))
            else:
                total.add(turn, out, turn.known(logsumexp))
        if coming is not None:
            block = coming()
    assert total is not None, "the first block is that of the rows"
    return total.finished(query.dtype)


@dataclass(frozen=True, slots=True)
class Total:
    """The weighted sum of the results so far, and the sum of weights exp(logsumexp - `largest`)."""

    out: Tensor
    weight: Tensor
    largest: Tensor
    unseen: Tensor
    """The logsumexp of the first turn, kept for rows without any visible key."""

    @staticmethod
    def of(out: Tensor, logsumexp: Tensor, known: Tensor) -> Total:
        return Total(out.to(known.dtype), (known != -inf).to(known.dtype), known.clone(), logsumexp)

    def add(self, turn: Turn, out: Tensor, known: Tensor) -> None:
        """Add the result of one more turn, in place."""
        total, weight, largest = map(turn.rows, (self.out, self.weight, self.largest))
        tile = tile_where_it_wins("merge", out)
        if tile is not None:
            from moaic.runtime.kernels.fused.merge import merge

            merge(total, weight, largest, out, known, tile)
        else:
            merged(total, weight, largest, out, known)

    def finished(self, dtype: torch.dtype) -> list[Tensor]:
        """The result and its logsumexp."""
        seen = self.weight > 0
        weight = torch.where(seen, self.weight, 1.0)
        logsumexp = torch.where(seen, self.largest + torch.log(weight), self.unseen)
        return [self.out.div_(weight.unsqueeze(-1)).to(dtype), logsumexp]


def _backward(
    ring: _Ring, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor
) -> list[Tensor]:
    block, leaving = [dense(key), dense(value)], list[Tensor]()
    total: Tensor | None = None
    for number, source in enumerate(ring.sources(), 1):
        given = block if number < ring.group.size else []
        coming = ring.passed(*given, *leaving)
        turn, grads = ring.turn(source, query.shape[2]), list[Tensor]()
        if turn:
            first, *grads = turn.backward([grad, query, out], block, logsumexp)
            if total is None:
                total = _wide(first)
            else:
                turn.rows(total).add_(first)
        arrived = coming()
        block, leaving = arrived[: len(given)], _added(turn, arrived[len(given) :], grads)
    assert total is not None, "the first block is that of the rows"
    own = ring.passed(*leaving)()
    return [each.to(like.dtype) for each, like in zip((total, *own), (query, key, value), strict=True)]


def _added(turn: Turn | None, arrived: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """The gradients of a block plus those of a turn; none have arrived for this rank's own block."""
    if not arrived:
        return [dense(_wide(grad)) for grad in grads]
    if turn:
        for total, grad in zip(arrived, grads, strict=True):
            turn.keys(total).add_(grad)
    return arrived


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
