"""A program's instructions arranged for transports that carry data while the worker computes.

What is gathered or scattered is on its way while a function runs (`ir/overlap_schedule.py`); small sums that stand next
to each other go in one. Both are read off the one list that all ranks share: they agree on it without a word, and still
communicate in the order of one list, which is why no two can wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from moaic.ir.graph import Function, Op, Value
from moaic.ir.layout import Mesh, Owner
from moaic.ir.op_names import ALL_REDUCE
from moaic.ir.overlap_schedule import meet, overlap_order

BUNDLE: Final = 32 << 20
"""Bytes of the sums that go in one, at most: more is fast enough alone. Assumed, as PyTorch's DDP assumes 25 MiB."""

BucketKey = tuple[str, Owner, str]
"""Axis, home and element type: sums that are alike in these are taken by the same groups of ranks."""


class Placed(NamedTuple):
    """An instruction and where it is written; where the first is, of several that go in one and have many operands."""

    position: int
    op: Op


def as_written(main: Function) -> list[Placed]:
    return [Placed(position, op) for position, op in enumerate(main.ops)]


def arranged(main: Function, mesh: Mesh, most: int = BUNDLE) -> list[Placed]:
    """The instructions of `main`; bundles have at most `most` bytes.

    Legal as what is gathered is there already, a bundle stands before whoever reads one of its sums, and all else
    keeps its order.
    """
    return _bundled([Placed(position, main.ops[position]) for position in overlap_order(main)], mesh, most)


def _bundled(steps: Sequence[Placed], mesh: Mesh, most: int) -> list[Placed]:
    """Sums that stand next to each other as one instruction, at the place of the last of them."""
    bundles = {indices[-1]: [steps[index] for index in indices] for indices in _bundles(steps, mesh, most)}
    inside = {step.position for bundle in bundles.values() for step in bundle}
    kept = [(index, step) for index, step in enumerate(steps) if index in bundles or step.position not in inside]
    return [_joined(bundles.get(index, [step])) for index, step in kept]


@dataclass(slots=True)
class _Bundle:
    nbytes: int = 0
    indices: list[int] = field(default_factory=list[int])
    values: set[Value] = field(default_factory=set[Value])
    """Operands and results: nothing that is summed is summed once more, or read by whoever comes between."""


def _bundles(steps: Sequence[Placed], mesh: Mesh, most: int) -> Iterator[list[int]]:
    """Where the sums of each bundle are, in order."""
    open_: dict[BucketKey, _Bundle] = {}
    for index, (_, op) in enumerate(steps):
        key = _key(op) if op.name == ALL_REDUCE and mesh.size(str(op.attrs["axis"])) > 1 else None
        nbytes = op.results[0].type.local_nbytes(mesh)
        for other, bundle in list(open_.items()):
            is_full = other == key and bundle.nbytes + nbytes > most
            # Ranks that go on to something else have their sums first, so that these are on their way meanwhile.
            is_over = key is None and meet(other[1], op)
            if is_full or is_over or not bundle.values.isdisjoint(op.inputs()):
                yield open_.pop(other).indices
        if key is not None and nbytes <= most:
            bundle = open_.setdefault(key, _Bundle())
            bundle.nbytes += nbytes
            bundle.indices.append(index)
            bundle.values.update(op.inputs(), op.results)
    yield from (bundle.indices for bundle in open_.values())


def _key(op: Op) -> BucketKey:
    kind = op.results[0].type
    return str(op.attrs["axis"]), kind.layout.owner, kind.dtype


def _joined(steps: Sequence[Placed]) -> Placed:
    first, *rest = steps
    if not rest:
        return first
    operands = tuple(value for step in steps for value in step.op.inputs())
    results = tuple(value for step in steps for value in step.op.results)
    return Placed(first.position, replace(first.op, operands=operands, results=results))
