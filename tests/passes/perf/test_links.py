"""Collectives over the levels of a cluster's links."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moaic.ir.collectives import COMMUNICATING
from moaic.ir.layout import Mesh
from moaic.passes.perf.links import Level, RankGroup, group_along, seconds_over
from moaic.passes.perf.numbers import MeasureSource, Number

KINDS = [name.removeprefix("moai.") for name in COMMUNICATING]
GIGA = 1e9


def level(name: str, workers: int, rate: float, latency: float = 0.0, *, direct: bool = False) -> Level:
    return Level(name, workers, Number(latency), Number(rate), direct)


HOSTS = (level("host", 8, 400e9), level("between", 1 << 20, 40e9))
"""Eight workers in a host, each of which has a tenth of its rate to other hosts."""

SLOW = (level("host", 8, 400e9, 1e-6), level("between", 1 << 20, 40e9, 1e-5))


def seconds(kind: str, nbytes: float, group: RankGroup, levels: tuple[Level, ...] = HOSTS) -> float:
    return seconds_over(levels, kind, nbytes, group).value


@given(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=4), st.integers(0, 3), st.data())
def test_a_group_is_as_far_apart_as_its_axis(sizes: list[int], unit: int, data: st.DataObject) -> None:
    mesh = Mesh(tuple((f"a{at}", size) for at, size in enumerate(sizes)))
    axis = data.draw(st.sampled_from([name for name, _ in mesh.axes]))
    group, ranks = group_along(axis, mesh), mesh.group(0, axis)
    assert group.ranks == len(ranks)
    assert all(after - before == group.stride for before, after in pairwise(ranks))
    # Sizes are powers of two, so that no unit's border cuts a group at another place than its own.
    assert group.inside(2**unit) == sum(rank < 2**unit for rank in ranks)


def test_inside_a_host_only_its_links_count() -> None:
    assert seconds("all_gather", GIGA, RankGroup(8)) == pytest.approx(7 / 8 / 400)
    assert seconds("all_gather", GIGA, RankGroup(2, 4)) == pytest.approx(1 / 2 / 400)
    assert seconds("all_reduce", GIGA, RankGroup(4, 2)) == pytest.approx(2 * 3 / 4 / 400)
    assert seconds("send", GIGA, RankGroup(2, 4)) == pytest.approx(1 / 400)
    assert seconds("all_to_all", GIGA, RankGroup(8)) == pytest.approx(7 / 8 / 400)


def test_between_hosts_all_cards_of_a_group_send() -> None:
    assert seconds("all_gather", GIGA, RankGroup(2, 8)) == pytest.approx(1 / 2 / 40)
    # Eight rings, one for each card: the slower of their links carries an eighth of everything.
    assert seconds("all_gather", GIGA, RankGroup(16)) == pytest.approx(15 / 16 / 320)
    # Level by level the hosts exchange half of everything over two cards each, the ranks of a host half of it.
    assert seconds("reduce_scatter", GIGA, RankGroup(4, 4)) == pytest.approx(1 / 2 / 80 + 1 / 2 / 400)
    assert seconds("send", GIGA, RankGroup(2, 8)) == pytest.approx(1 / 40)
    # Half of what each has goes to the other host, over its own card.
    assert seconds("all_to_all", GIGA, RankGroup(16)) == pytest.approx(1 / 2 / 40)


def test_links_between_pairs_are_used_as_far_as_the_group_reaches() -> None:
    pairs = (level("host", 8, 448e9, direct=True), HOSTS[1])
    assert seconds("all_gather", GIGA, RankGroup(8), pairs) == pytest.approx(7 / 8 / 448)
    assert seconds("all_gather", GIGA, RankGroup(2), pairs) == pytest.approx(1 / 2 / 64)
    assert seconds("send", GIGA, RankGroup(2), pairs) == pytest.approx(1 / 64)


def test_small_messages_take_the_algorithm_with_few_of_them() -> None:
    ring = 7 * 8 * 1e-6 + 7 * 1e-5
    assert seconds("all_gather", 0, RankGroup(64), SLOW) == pytest.approx(7 * 1e-6 + 7 * 1e-5)
    assert seconds("all_gather", 0, RankGroup(64), SLOW) < ring
    assert seconds("all_reduce", 0, RankGroup(64), SLOW) == pytest.approx(2 * (3 * 1e-6 + 3 * 1e-5))
    # A large one goes around the ring, which keeps all links busy at once.
    large = seconds("all_gather", 64 * GIGA, RankGroup(64), SLOW)
    assert large == pytest.approx(63 / 320 + 56 * 1e-6 + 7 * 1e-5)


@given(
    st.sampled_from([*KINDS, "send"]),
    st.sampled_from([2, 4, 8, 16, 64, 512]),
    st.sampled_from([1, 2, 4, 8, 32]),
    st.floats(0, 1e10),
)
def test_more_bytes_and_longer_ways_take_no_less(kind: str, ranks: int, stride: int, nbytes: float) -> None:
    group = RankGroup(2 if kind == "send" else ranks, stride)
    found = seconds(kind, nbytes, group, SLOW)
    assert found <= seconds(kind, 2 * nbytes, group, SLOW)
    assert found <= seconds(kind, nbytes, RankGroup(group.ranks, 2 * stride), SLOW) * (1 + 1e-9)


def test_a_collective_is_known_as_well_as_the_worst_level_that_it_uses() -> None:
    known = Number(1e9, MeasureSource.MEASURED)
    levels = (Level("host", 8, known, known), Level("between", 64, known, Number(1e9)))
    assert seconds_over(levels, "all_gather", 1, RankGroup(8)).source is MeasureSource.MEASURED
    assert seconds_over(levels, "all_gather", 1, RankGroup(16)).source is MeasureSource.ASSUMED
    assert seconds_over(levels, "all_gather", 1, RankGroup(2, 8)).source is MeasureSource.ASSUMED
