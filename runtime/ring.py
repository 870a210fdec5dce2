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

from moaic.ir.graph import Op
from moaic.ir.ring import OPERANDS, RING, attention_of
from moaic.runtime.moves import Seat, dense
from moaic.runtime.to_fx import run_op
from moaic.runtime.transport import Group


@dataclass(frozen=True, slots=True)
class _Ring:
    """One rank's side of a ring."""

    op: Op
    seat: Seat
    group: Group

    @property
    def is_causal(self) -> bool:
        return bool(self.op.attrs.get("is_causal", False))

    def sources(self) -> Iterator[int]:
        """Whose block is at hand, turn by turn: from one's own on backwards."""
        return ((self.group.index - turn) % self.group.size for turn in range(self.group.size))

    def sees(self, source: int) -> bool:
        """Whether the rows here look at any key of a block: under a causal flag not at those of later ranks."""
        return source <= self.group.index or not self.is_causal

    def passed(self, *tensors: Tensor) -> Callable[[], list[Tensor]]:
        """Begins to give tensors to the next rank."""
        return self.seat.transport.begin_pass(tensors, self.group)

    def attention(self, source: int, operands: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """The turn with one block, by the call that one device would make."""
        block = Op(self.op.name, attrs={**self.op.attrs, "is_causal": self.is_diagonal(source)})
        return run_op(block, operands, self.seat.station.device)

    def is_diagonal(self, source: int) -> bool:
        """Whether the flag cuts through a block."""
        return self.is_causal and source == self.group.index

    def columns(self, mask: Tensor | None, source: int) -> Tensor | None:
        """Of a mask what it says of one block."""
        if mask is None or mask.shape[-1] == 1:
            return mask
        count = mask.shape[-1] // self.group.size
        return mask.narrow(-1, source * count, count)


def going_round(op: Op, seat: Seat) -> Callable[[list[Tensor]], list[Tensor]]:
    """What a rank does in a ring, from its local operands to its local results."""
    ring = _Ring(attention_of(op), seat, seat.group(str(op.attrs["axis"])))
    run, count = (_forward if op.name == RING else _backward), OPERANDS[ring.op.name]

    def of_operands(inputs: list[Tensor]) -> list[Tensor]:
        return run(ring, *inputs[:count], mask=inputs[count] if len(inputs) > count else None)

    return of_operands


def _forward(ring: _Ring, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> list[Tensor]:
    block = [dense(key), dense(value)]
    total: _Total | None = None
    for turn, source in enumerate(ring.sources(), 1):
        coming = ring.passed(*block) if turn < ring.group.size else None
        if ring.sees(source):
            columns = ring.columns(mask, source)
            out, logsumexp = ring.attention(source, [query, *block, columns])
            known = _known(logsumexp, columns, ring.is_diagonal(source))
            total = _Total.of(out, logsumexp, known) if total is None else total.with_more(out, known)
        if coming is not None:
            block = coming()
    assert total is not None, "the first block is that of the rows"
    return total.finished(query.dtype)


@dataclass(frozen=True, slots=True)
class _Total:
    """Results so far, each weighted by the exponential of its logsumexp less the largest, and the sum of weights."""

    out: Tensor
    weight: Tensor
    largest: Tensor
    unseen: Tensor
    """The logsumexp of rows that see no key at all, as attention gives it."""

    @staticmethod
    def of(out: Tensor, logsumexp: Tensor, known: Tensor) -> _Total:
        return _Total(out.to(known.dtype), (known != -inf).to(known.dtype), known, logsumexp)

    def with_more(self, out: Tensor, known: Tensor) -> _Total:
        """The result of one more turn added, in place."""
        largest = torch.maximum(self.largest, known)
        finite = torch.where(largest == -inf, 0.0, largest)
        kept, more = torch.exp(self.largest - finite), torch.exp(known - finite)
        added = self.out.mul_(kept.unsqueeze(-1)).add_(out * more.unsqueeze(-1))
        return _Total(added, self.weight * kept + more, largest, self.unseen)

    def finished(self, dtype: torch.dtype) -> list[Tensor]:
        """The result and its logsumexp."""
        seen = self.weight > 0
        weight = torch.where(seen, self.weight, 1.0)
        logsumexp = torch.where(seen, self.largest + torch.log(weight), self.unseen)
        return [self.out.div_(weight.unsqueeze(-1)).to(dtype), logsumexp]


def _known(logsumexp: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """The logsumexp of one turn, -inf for rows that see nothing of its block, of which not all kernels say so."""
    if mask is None:
        return logsumexp
    seen = mask if mask.dtype == torch.bool else mask > -inf
    if is_causal:
        rows = logsumexp.shape[-1]
        seen = seen & torch.ones(rows, rows, dtype=torch.bool, device=mask.device).tril()
    return torch.where(seen.any(-1), logsumexp, -inf)


def _backward(
    ring: _Ring,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
) -> list[Tensor]:
    block, leaving = [dense(key), dense(value)], list[Tensor]()
    total: Tensor | None = None
    for turn, source in enumerate(ring.sources(), 1):
        given = block if turn < ring.group.size else []
        coming = ring.passed(*given, *leaving)
        made: list[Tensor] = []
        if ring.sees(source):
            operands = [grad, query, *block, out, logsumexp, ring.columns(mask, source)]
            first, *made = ring.attention(source, operands)
            total = _wide(first) if total is None else total.add_(first)
        arrived = coming()
        block, leaving = arrived[: len(given)], _added(arrived[len(given) :], made)
    assert total is not None, "the first block is that of the rows"
    home = ring.passed(*leaving)()
    return [each.to(like.dtype) for each, like in zip((total, *home), (query, key, value), strict=True)]


def _added(arrived: list[Tensor], made: list[Tensor]) -> list[Tensor]:
    """Gradients of a block with what the rows here add to them; nothing has arrived where the block is from here."""
    if not arrived:
        return [dense(_wide(each)) for each in made]
    return [each.add_(more) for each, more in zip(arrived, made, strict=True)] if made else arrived


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
