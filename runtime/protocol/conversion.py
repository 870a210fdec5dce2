"""The resharding of a value: its placement before and after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moaic.ir.layout import Layout, Mesh, Split
from moaic.runtime.protocol.placement import Placement


@dataclass(frozen=True, slots=True)
class Resharding:
    """A change of placement for values of one type and shape."""

    dtype: str
    shape: tuple[int, ...]
    before: Placement
    after: Placement

    @property
    def participants(self) -> tuple[int, ...]:
        """The ranks that exchange data; none if every holder of the result has a part that it is cut from."""
        had, gets = set(self.before.holders), set(self.after.holders)
        return () if self.before.is_uncut and gets <= had else tuple(sorted(had | gets))

    def encoded(self) -> list[Any]:
        return [self.dtype, list(self.shape), _encode(self.before), _encode(self.after)]

    @staticmethod
    def decoded(data: Any) -> Resharding:
        dtype, shape, before, after = data
        return Resharding(dtype, tuple(shape), _decode(before), _decode(after))


def _encode(place: Placement) -> list[Any]:
    splits = [[split.axis, split.dim, split.stride] for split in place.layout.splits]
    return [[list(axis) for axis in place.mesh.axes], splits, list(place.layout.partial), place.layout.owner]


def _decode(data: Any) -> Placement:
    axes, splits, partial, owner = data
    layout = Layout(tuple(Split(*split) for split in splits), tuple(partial), tuple((axis, at) for axis, at in owner))
    return Placement(Mesh(tuple((axis, size) for axis, size in axes)), layout)
