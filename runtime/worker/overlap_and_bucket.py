"""Schedules of a program's instructions for asynchronous transports: overlap of collectives, bucketing of all-reduces.

All-gathers and reduce-scatters run while functions compute (`ir/overlap_schedule.py`); small adjacent all-reduces are
bucketed into one. Both are computed from the list of instructions that all ranks share, so the ranks agree without
communication. All communicate in the order of this one list, so no two can deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from moaic.ir.graph import Function, Op, Value
from moaic.ir.layout import Mesh, Owner
from moaic.ir.op_names import ALL_REDUCE
from moaic.ir.overlap_schedule import meet, overlap_order

BUCKET: Final = 32 << 20
"""Maximal bytes of a bucket: a larger all-reduce is efficient alone. Assumed, as PyTorch's DDP assumes 25 MiB."""

BucketKey = tuple[str, Owner, str]
"""Axis, owner and element type: all-reduces with the same key have the same groups of ranks."""


class Placed(NamedTuple):
    """An instruction and its index in the program; for a bucket, the index of its first all-reduce."""

    position: int
    op: Op


def program_order(main: Function) -> list[Placed]:
    """The instructions of `main` in the order of the program."""
    return [Placed(position, op) for position, op in enumerate(main.ops)]


def arranged(main: Function, mesh: Mesh, most: int = BUCKET) -> list[Placed]:
    """The instructions of `main`, scheduled for overlap; buckets have at most `most` bytes.

    Legal, as a gather moves only to where its operand exists, a bucket precedes all uses of its results, and all other
    instructions keep their order.
    """
    return _bucketed([Placed(position, main.ops[position]) for position in overlap_order(main)], mesh, most)


def _bucketed(steps: Sequence[Placed], mesh: Mesh, most: int) -> list[Placed]:
    """The all-reduces of each bucket as one instruction, at the position of the last of them.

    a = all_reduce(x); b = all_reduce(y)   ->   a, b = all_reduce(x, y)
    """
    buckets = {indices[-1]: [steps[index] for index in indices] for indices in _buckets(steps, mesh, most)}
    bucketed = {step.position for bucket in buckets.values() for step in bucket}
    kept = [(index, step) for index, step in enumerate(steps) if index in buckets or step.position not in bucketed]
    return [_joined(buckets.get(index, [step])) for index, step in kept]


@dataclass(slots=True)
class _Bucket:
    nbytes: int = 0
    indices: list[int] = field(default_factory=list[int])
    values: set[Value] = field(default_factory=set[Value])
    """Operands and results: an instruction that reads one of them closes the bucket."""


def _buckets(steps: Sequence[Placed], mesh: Mesh, most: int) -> Iterator[list[int]]:
    """The indices of the all-reduces of each bucket, in order."""
    open_: dict[BucketKey, _Bucket] = {}
    for index, (_, op) in enumerate(steps):
        key = _key(op) if op.name == ALL_REDUCE and mesh.size(str(op.attrs["axis"])) > 1 else None
        nbytes = op.results[0].type.local_nbytes(mesh)
        for other, bucket in list(open_.items()):
            is_full = other == key and bucket.nbytes + nbytes > most
            # The bucket's ranks run another instruction next: the all-reduce starts before it, to overlap with it.
            is_over = key is None and meet(other[1], op)
            if is_full or is_over or not bucket.values.isdisjoint(op.inputs()):
                yield open_.pop(other).indices
        if key is not None and nbytes <= most:
            bucket = open_.setdefault(key, _Bucket())
            bucket.nbytes += nbytes
            bucket.indices.append(index)
            bucket.values.update(op.inputs(), op.results)
    yield from (bucket.indices for bucket in open_.values())


def _key(op: Op) -> BucketKey:
    type_ = op.results[0].type
    return str(op.attrs["axis"]), type_.layout.owner, type_.dtype


def _joined(steps: Sequence[Placed]) -> Placed:
    first, *rest = steps
    if not rest:
        return first
    operands = tuple(value for step in steps for value in step.op.inputs())
    results = tuple(value for step in steps for value in step.op.results)
    return Placed(first.position, replace(first.op, operands=operands, results=results))
