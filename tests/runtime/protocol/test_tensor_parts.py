"""Cutting and joining along sub-axes, compared with indices computed one by one."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from moaic.ir.layout import Layout, Mesh, Split, is_uneven
from moaic.runtime.host.cores import share_out
from moaic.runtime.protocol.placement import Placement, alike, everywhere, owners
from moaic.runtime.protocol.tensor_parts import assemble, cut, join, local_part

small = st.integers(1, 4)


@given(outer=small, count=small, stride=small, before=small, after=small)
def test_a_cut_takes_one_digit(outer: int, count: int, stride: int, before: int, after: int) -> None:
    tensor = torch.arange(before * outer * count * stride * after).view(before, -1, after)
    parts = [cut(tensor, 1, stride, count, index) for index in range(count)]
    for index, part in enumerate(parts):
        taken = [i for i in range(tensor.shape[1]) if (i // stride) % count == index]
        assert torch.equal(part, tensor[:, taken])
    assert torch.equal(join(parts, 1, stride), tensor)


@st.composite
def placements(draw: st.DrawFn) -> tuple[Placement, tuple[int, ...]]:
    """Placements of a two-dimensional value over up to three axes: several split one dim, or one splits it unevenly."""
    axes = tuple((name, draw(st.integers(1, 3))) for name in ("a", "b", "c"))
    shape = [draw(st.integers(1, 3)), draw(st.integers(1, 3))]
    splits: list[Split] = []
    for name, size in draw(st.permutations(axes)):
        dim = draw(st.sampled_from((0, 1, None)))
        if dim is not None:
            splits.append(Split(name, dim, shape[dim]))
            shape[dim] *= size * draw(st.integers(1, 2))
    for dim in (0, 1):
        alone = [(split.stride, dict(axes)[split.axis]) for split in splits if split.dim == dim]
        if len(alone) == 1 and shape[dim] == prod(alone[0]):
            shape[dim] = draw(st.sampled_from([shape[dim], *(n for n in range(shape[dim]) if is_uneven(n, *alone[0]))]))
    ordered = tuple(sorted(splits, key=lambda split: (split.dim, -split.stride)))
    return Placement(Mesh(axes), Layout(ordered)), (shape[0], shape[1])


@given(placements())
def test_the_parts_of_all_ranks_make_the_whole(drawn: tuple[Placement, tuple[int, ...]]) -> None:
    place, shape = drawn
    value = torch.arange(1, shape[0] * shape[1] + 1).view(shape)
    parts = {rank: local_part(value, place.mesh, place.layout, rank) for rank in owners(place)}
    assert all(tuple(part.shape) == place.layout.local_shape(shape, place.mesh) for part in parts.values())
    everyone = {rank: local_part(value, place.mesh, place.layout, rank) for rank in range(place.mesh.ranks)}
    assert torch.equal(assemble(lambda rank: everyone[rank], shape, place.mesh, place.layout), value)
    assert sum(part.count_nonzero() for part in parts.values()) == value.numel()


def test_meshes_of_other_names_can_hold_the_same_parts() -> None:
    rows = Layout((Split("dp", 0, 2),))
    one = Placement(Mesh((("dp", 2),)), rows)
    other = Placement(Mesh((("tp", 2), ("dp", 1))), Layout((Split("tp", 0, 2),)))
    assert alike(one, other)
    assert not alike(one, everywhere(2))
    assert alike(everywhere(2), Placement(Mesh((("dp", 2),))))
    assert not alike(everywhere(2), Placement())


def test_threads_are_shared_out() -> None:
    assert share_out(5, 2) == (3, 2)
    assert share_out(2, 4) == (1, 1, 1, 1)
