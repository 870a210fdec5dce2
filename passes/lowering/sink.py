"""Code sinking: ops of one segment that only a later one reads move there if fewer bytes are live in between.

A large value that is cheap to compute is then not computed long before its use: the one-hot labels of a loss, as wide
as its logits, are made beside the logits and not before the first layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from moaic.ir.graph import Function, Op, Value
from moaic.ir.layout import Mesh, Owner
from moaic.ir.ops import Kind, kind_of

SinkKey = tuple[Hashable, int, Owner]
"""Identifies a segment: its phase, its level, and the rank or stage that owns it."""

_COPIED = (Kind.VIEW, Kind.NULLARY)
_FIXED = (Kind.INSTRUCTION, Kind.HEAVY)


def sunk(function: Function, keys: Sequence[SinkKey], mesh: Mesh) -> list[SinkKey]:
    """The segment of every op, given the earliest one possible. No op changes its phase or its owner."""
    sinking = _Sinking(function, keys, mesh)
    segments = list(keys)
    for group in sinking.groups():
        if sinking.saved(group) > sinking.kept(group):
            for index in group:
                segments[index] = sinking.wanted[index]
    return segments


@dataclass
class _Sinking:
    """A function in segments. Every segment rebuilds the views and constants it reads: a view counts as its operand."""

    function: Function
    keys: Sequence[SinkKey]
    mesh: Mesh
    wanted: dict[int, SinkKey] = field(default_factory=dict[int, SinkKey])
    """By op, the only later segment that reads its results."""

    def __post_init__(self) -> None:
        for index in reversed(range(len(self.keys))):
            if kind_of(self.function.ops[index]) not in (*_FIXED, *_COPIED):
                wanted = self._wanted(index)
                if wanted is not None:
                    self.wanted[index] = wanted

    def _wanted(self, index: int) -> SinkKey | None:
        readers = [reader for result in self.function.ops[index].results for reader in self.readers[result]]
        keys = {self.wanted.get(reader, self.keys[reader]) for reader in readers if reader >= 0}
        if len(keys) != 1 or any(reader < 0 or self._is(reader, Kind.INSTRUCTION) for reader in readers):
            return None
        (key,) = keys
        phase, level, owner = self.keys[index]
        return key if (phase, owner) == (key[0], key[2]) and level < key[1] else None

    def _is(self, index: int, *kinds: Kind) -> bool:
        return kind_of(self.function.ops[index]) in kinds

    @cached_property
    def readers(self) -> Mapping[Value, Sequence[int]]:
        """Positions of the ops that read a value, possibly through views; -1 for the function's results."""
        readers: dict[Value, list[int]] = defaultdict(list)
        for value in self.function.results:
            readers[value].append(-1)
        for index in reversed(range(len(self.function.ops))):
            op = self.function.ops[index]
            through = [reader for result in op.results for reader in readers[result]]
            for value in dict.fromkeys(op.inputs()):
                readers[value] += through if self._is(index, *_COPIED) else [index]
        return readers

    @cached_property
    def sources(self) -> Mapping[Value, Collection[Value]]:
        """By value, the results of other ops that it is a view of."""
        sources: dict[Value, set[Value]] = {}
        for op in self.function.ops:
            read = {source for value in op.inputs() for source in sources.get(value, ())}
            sources.update((result, read if kind_of(op) in _COPIED else {result}) for result in op.results)
        return sources

    @cached_property
    def starts(self) -> Mapping[SinkKey, int]:
        """Position of the first op of each segment."""
        return {key: index for index, key in reversed([*enumerate(self.keys)])}

    def groups(self) -> Iterator[Collection[int]]:
        """Connected groups of ops that may sink into one segment."""
        group_of: dict[int, set[int]] = {}
        for index in self.wanted:
            group = group_of[index] = {index}
            for result in self.function.ops[index].results:
                for other in {reader for reader in self.readers[result] if reader in self.wanted}:
                    group |= group_of[other]
            group_of.update(dict.fromkeys(group, group))
        return iter({id(group): group for group in group_of.values()}.values())

    def saved(self, group: Collection[int]) -> int:
        """Bytes that are no longer live between the two segments if the group sinks."""
        made = {result for i in group for result in self.function.ops[i].results}
        return self._nbytes(value for value in made if any(reader not in group for reader in self.readers[value]))

    def kept(self, group: Collection[int]) -> int:
        """Bytes that are live instead: operands of the group that no other op reads as late, parameters left out."""
        start = self.starts[self.wanted[next(iter(group))]]
        read = {value for i in group for value in self._read(self.function.ops[i])}
        own = {result for i in group for result in self.function.ops[i].results}
        return self._nbytes(value for value in read - own if not self._is_late(value, group, start))

    def _is_late(self, value: Value, group: Collection[int], start: int) -> bool:
        return any(reader < 0 or (reader >= start and reader not in group) for reader in self.readers[value])

    def _read(self, op: Op) -> Iterator[Value]:
        return (source for value in op.inputs() for source in self.sources.get(value, ()))

    def _nbytes(self, values: Iterator[Value]) -> int:
        return sum(value.type.local_nbytes(self.mesh) for value in values)
