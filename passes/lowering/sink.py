"""Ops of one segment that only a later one wants go there, where that leaves fewer bytes to keep in between.

So nothing large that is cheap to make is made long before it is read: a loss's one-hot labels, as wide as its logits,
are made where the logits are and not before the first layer.
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
"""Names a segment: its phase, its level, and where it runs."""

_COPIED = (Kind.VIEW, Kind.NULLARY)
_FIXED = (Kind.INSTRUCTION, Kind.HEAVY)


def sunk(function: Function, keys: Sequence[SinkKey], mesh: Mesh) -> list[SinkKey]:
    """The segment of every op, given those in which they can be done first. No op leaves its phase or its place."""
    sight = _Sinking(function, keys, mesh)
    found = list(keys)
    for cone in sight.cones():
        if sight.saved(cone) > sight.kept(cone):
            for index in cone:
                found[index] = sight.wanted[index]
    return found


@dataclass
class _Sinking:
    """A function in segments. Views and constants are in every segment that reads them, and are seen through."""

    function: Function
    keys: Sequence[SinkKey]
    mesh: Mesh
    wanted: dict[int, SinkKey] = field(default_factory=dict[int, SinkKey])
    """The one later segment that wants what an op makes."""

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
        phase, level, home = self.keys[index]
        return key if (phase, home) == (key[0], key[2]) and level < key[1] else None

    def _is(self, index: int, *kinds: Kind) -> bool:
        return kind_of(self.function.ops[index]) in kinds

    @cached_property
    def readers(self) -> Mapping[Value, Sequence[int]]:
        """Positions of the ops that read a value, perhaps through views; -1 for the function's results."""
        found: dict[Value, list[int]] = defaultdict(list)
        for value in self.function.results:
            found[value].append(-1)
        for index in reversed(range(len(self.function.ops))):
            op = self.function.ops[index]
            through = [reader for result in op.results for reader in found[result]]
            for value in dict.fromkeys(op.inputs()):
                found[value] += through if self._is(index, *_COPIED) else [index]
        return found

    @cached_property
    def sources(self) -> Mapping[Value, Collection[Value]]:
        """What a value is a view of, as far as ops make it that are not copied."""
        found: dict[Value, set[Value]] = {}
        for op in self.function.ops:
            read = {source for value in op.inputs() for source in found.get(value, ())}
            found.update((result, read if kind_of(op) in _COPIED else {result}) for result in op.results)
        return found

    @cached_property
    def starts(self) -> Mapping[SinkKey, int]:
        """Position of the first op of each segment."""
        return {key: index for index, key in reversed([*enumerate(self.keys)])}

    def cones(self) -> Iterator[Collection[int]]:
        """Ops that may go to the same segment and hang together."""
        cone_of: dict[int, set[int]] = {}
        for index in self.wanted:
            cone = cone_of[index] = {index}
            for result in self.function.ops[index].results:
                for other in {reader for reader in self.readers[result] if reader in self.wanted}:
                    cone |= cone_of[other]
            cone_of.update(dict.fromkeys(cone, cone))
        return iter({id(cone): cone for cone in cone_of.values()}.values())

    def saved(self, cone: Collection[int]) -> int:
        """Bytes that need not be kept from one segment to the other."""
        made = {result for i in cone for result in self.function.ops[i].results}
        return self._nbytes(value for value in made if any(reader not in cone for reader in self.readers[value]))

    def kept(self, cone: Collection[int]) -> int:
        """Bytes that must be kept instead: what nobody else reads as late as that, and was not given."""
        start = self.starts[self.wanted[next(iter(cone))]]
        read = {value for i in cone for value in self._read(self.function.ops[i])}
        own = {result for i in cone for result in self.function.ops[i].results}
        return self._nbytes(value for value in read - own if not self._is_late(value, cone, start))

    def _is_late(self, value: Value, cone: Collection[int], start: int) -> bool:
        return any(reader < 0 or (reader >= start and reader not in cone) for reader in self.readers[value])

    def _read(self, op: Op) -> Iterator[Value]:
        return (source for value in op.inputs() for source in self.sources.get(value, ()))

    def _nbytes(self, values: Iterator[Value]) -> int:
        return sum(value.type.local_nbytes(self.mesh) for value in values)
