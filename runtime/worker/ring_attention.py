"""Attention by ring exchange on a worker: turn by turn with the block of keys at hand, while the next one comes.

Each turn is the same call as attention on one device, so its softmax is over its own keys. A forward adds up the
results, each weighted by the exponential of its logsumexp less the largest so far, and divides by the sum of these
weights once, at the end: so rows whose scores are all the lowest number, where a logsumexp tells nothing of how many
keys it is of, come out as on one device. A backward starts from the result and the logsumexp of all keys, and its turns
simply add up: the query's gradient here, those of keys and values on their way, in the order of the ranks, whoever is
late. What is narrower than float32 is added up in float32 and rounded once.
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
    seat: RankContext
    group: Group
    mask: Tensor | None
    """For the rows here; its columns are whole."""

    def sources(self) -> Iterator[int]:
        """Whose block is at hand, turn by turn: from one's own on backwards."""
        return ((self.group.index - turn) % self.group.size for turn in range(self.group.size))

    def passed(self, *tensors: Tensor) -> Callable[[], list[Tensor]]:
        """Begins to give tensors to the next rank."""
        return self.seat.transport.begin_pass(tensors, self.group)

    def turn(self, source: int, rows: int) -> Turn | None:
        """What so many rows here have to do with a block; None where they look at none of its keys."""
        attention, causal, is_later = attention_of(self.op), is_causal(self.op), source > self.group.index
        if causal and is_later and (rows == 1 or not is_striped(self.op)):
            return None
        flag = causal and (source == self.group.index or is_striped(self.op))
        op = Op(attention.name, attrs={**attention.attrs, "is_causal": flag})
        return Turn(op, self.seat.context.device, self._columns(source), int(causal and is_later))

    def _columns(self, source: int) -> Tensor | None:
        """What the mask says of one block."""
        if self.mask is None or self.mask.shape[-1] == 1:
            return self.mask
        if is_striped(self.op):
            return self.mask[..., source :: self.group.size]
        count = self.mask.shape[-1] // self.group.size
        return self.mask.narrow(-1, source * count, count)


@dataclass(frozen=True, slots=True)
class Turn:
    """The rows here and one block of keys.

    In stripes a row sees the keys up to the one of its own number under a causal flag, but this one only if it is not
    of a later rank: then it is as if the first row and the last key were not there.
    """

    op: Op
    device: torch.device
    columns: Tensor | None
    skipped: int
    """First rows that see nothing, and as many last keys that no row sees."""

    def rows(self, tensor: Tensor) -> Tensor:
        return tensor.narrow(2, self.skipped, tensor.shape[2] - self.skipped)

    def keys(self, tensor: Tensor) -> Tensor:
        return tensor.narrow(2, 0, tensor.shape[2] - self.skipped)

    def forward(self, query: Tensor, block: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The result for `rows` and its logsumexp."""
        out, logsumexp = run_op(self.op, [self.rows(query), *map(self.keys, block), self._mask()], self.device)
        return out, logsumexp

    def backward(self, of_rows: Sequence[Tensor], block: Sequence[Tensor], logsumexp: Tensor) -> Sequence[Tensor]:
        """The gradient of the query for `rows`, and those of keys and values for `keys`."""
        grad, query, out = map(self.rows, of_rows)
        block = [self.keys(each) for each in block]
        return run_op(self.op, [grad, query, *block, out, dense(self.rows(logsumexp)), self._mask()], self.device)

    def known(self, logsumexp: Tensor) -> Tensor:
        """A logsumexp of this turn, -inf for rows that see nothing of the block, of which not all kernels say so."""
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


def going_round(op: Op, seat: RankContext) -> Callable[[list[Tensor]], list[Tensor]]:
    """What a rank does in a ring, from its local operands to its local results."""
    group, count = seat.group(str(op.attrs["axis"])), ATTENTION[attention_of(op).name]
    run = _forward if op.name == RING else _backward

    def of_operands(inputs: list[Tensor]) -> list[Tensor]:
        return run(_Ring(op, seat, group, inputs[count] if len(inputs) > count else None), *inputs[:count])

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
    """Results so far, each weighted by the exponential of its logsumexp less the largest, and the sum of weights."""

    out: Tensor
    weight: Tensor
    largest: Tensor
    unseen: Tensor
    """The logsumexp of rows that see no key at all, as attention gives it."""

    @staticmethod
    def of(out: Tensor, logsumexp: Tensor, known: Tensor) -> Total:
        return Total(out.to(known.dtype), (known != -inf).to(known.dtype), known.clone(), logsumexp)

    def add(self, turn: Turn, out: Tensor, known: Tensor) -> None:
        """The result of one more turn, in place."""
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
        turn, made = ring.turn(source, query.shape[2]), list[Tensor]()
        if turn:
            first, *made = turn.backward([grad, query, out], block, logsumexp)
            if total is None:
                total = _wide(first)
            else:
                turn.rows(total).add_(first)
        arrived = coming()
        block, leaving = arrived[: len(given)], _added(turn, arrived[len(given) :], made)
    assert total is not None, "the first block is that of the rows"
    home = ring.passed(*leaving)()
    return [each.to(like.dtype) for each, like in zip((total, *home), (query, key, value), strict=True)]


def _added(turn: Turn | None, arrived: list[Tensor], made: list[Tensor]) -> list[Tensor]:
    """Gradients of a block with what a turn adds to them; nothing has arrived where the block is from here."""
    if not arrived:
        return [dense(_wide(each)) for each in made]
    if turn:
        for each, more in zip(arrived, made, strict=True):
            turn.keys(each).add_(more)
    return arrived


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
