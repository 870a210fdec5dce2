"""Collectives over the levels of a cluster's links."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moaic.ir.collectives import COMMUNICATING
from moaic.ir.layout import Mesh
from moaic.passes.perf.links import Level, RankGroup, are_inside, group_along, message_over, seconds_over
from moaic.passes.perf.numbers import ZERO, MeasureSource, Number

KINDS = [name.removeprefix("moai.") for name in COMMUNICATING]
GIGA = 1e9


def level(name: str, workers: int, rate: float, latency: float = 0.0, *, direct: bool = False) -> Level:
    return Level(name, workers, Number(latency), Number(rate), direct)


HOSTS = (level("host", 8, 400e9), level("between", 1 << 20, 40e9))
"""Eight workers in a host, each of which has a tenth of its rate to other hosts."""

SLOW = (level("host", 8, 400e9, 1e-6), level("between", 1 << 20, 40e9, 1e-5))


def seconds(kind: str, nbytes: float, group: RankGroup, levels: tuple[Level, ...] = HOSTS) -> float:
    return seconds_over(levels, kind, nbytes, group).value


def at_best_and_worst(mesh: Mesh, axis: str, workers: int) -> tuple[int, int]:
    """Of all groups along an axis the most and the fewest ranks that any unit has of one of them."""
    counts = [Counter(rank // workers for rank in mesh.group(start, axis)) for start in range(mesh.ranks)]
    return max(max(each.values()) for each in counts), min(min(each.values()) for each in counts)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(1, 12), st.data())
def test_a_group_is_as_far_apart_as_its_axis(sizes: list[int], workers: int, data: st.DataObject) -> None:
    mesh = Mesh(tuple((f"a{at}", size) for at, size in enumerate(sizes)))
    axis = data.draw(st.sampled_from([name for name, _ in mesh.axes]))
    group, ranks = group_along(axis, mesh), mesh.group(0, axis)
    assert group.ranks == len(ranks)
    assert all(after - before == group.stride for before, after in pairwise(ranks))
    most, fewest = at_best_and_worst(mesh, axis, workers)
    assert group.inside(workers) <= fewest <= most
    if most == fewest and group.stride <= workers and workers % group.stride == 0:
        assert group.inside(workers) == fewest
    assert not group.is_inside(workers) or fewest == group.ranks


@given(st.integers(2, 6), st.integers(1, 6), st.integers(1, 12), st.data())
def test_stages_are_in_one_unit_if_all_their_ranks_are(
    stages: int, ranks: int, workers: int, data: st.DataObject
) -> None:
    mesh = Mesh((("pp", stages), ("dp", ranks)))
    source, target = data.draw(st.permutations(range(stages)))[:2]
    pairs = [(mesh.rank({"pp": source, "dp": rank}), mesh.rank({"pp": target, "dp": rank})) for rank in range(ranks)]
    expected = all(one // workers == other // workers for one, other in pairs)
    assert are_inside("pp", (source, target), mesh)(workers) == expected


def test_inside_a_host_only_its_links_count() -> None:
    assert seconds("all_gather", GIGA, RankGroup(8)) == pytest.approx(7 / 8 / 400)
    assert seconds("all_gather", GIGA, RankGroup(2, 4)) == pytest.approx(1 / 2 / 400)
    assert seconds("all_reduce", GIGA, RankGroup(4, 2)) == pytest.approx(2 * 3 / 4 / 400)
    assert seconds("all_to_all", GIGA, RankGroup(8)) == pytest.approx(7 / 8 / 400)


def test_between_hosts_all_cards_of_a_group_send() -> None:
    assert seconds("all_gather", GIGA, RankGroup(2, 8)) == pytest.approx(1 / 2 / 40)
    # Eight rings, one for each card: the slower of their links carries an eighth of everything.
    assert seconds("all_gather", GIGA, RankGroup(16)) == pytest.approx(15 / 16 / 320)
    # Level by level the hosts exchange half of everything over two cards each, the ranks of a host half of it.
    assert seconds("reduce_scatter", GIGA, RankGroup(4, 4)) == pytest.approx(1 / 2 / 80 + 1 / 2 / 400)
    # Half of what each has goes to the other host, over its own card.
    assert seconds("all_to_all", GIGA, RankGroup(16)) == pytest.approx(1 / 2 / 40)


def test_a_message_takes_the_links_of_the_first_level_that_has_both_ends() -> None:
    assert message_over(SLOW, GIGA, lambda workers: workers >= 8).value == pytest.approx(1 / 400 + 1e-6)
    assert message_over(SLOW, GIGA, lambda workers: workers >= 9).value == pytest.approx(1 / 40 + 1e-5)
    assert message_over(SLOW, GIGA, lambda _: False).value == pytest.approx(1 / 40 + 1e-5)


def test_one_rank_sends_nothing() -> None:
    assert seconds_over(HOSTS, "all_reduce", GIGA, RankGroup(1)) == ZERO


def test_groups_across_the_border_of_a_host_are_not_inside_it() -> None:
    """Four of twelve workers in hosts of six: the second group has two in each."""
    six = (level("host", 6, 400e9), level("between", 1 << 20, 40e9))
    group = group_along("tp", Mesh((("dp", 3), ("tp", 4))))
    assert seconds("all_gather", GIGA, group, six) == pytest.approx(1 / 2 / 80 + 1 / 2 / 400)
    alone = group_along("dp", Mesh((("dp", 3),)))
    assert seconds("all_gather", GIGA, alone) == pytest.approx(2 / 3 / 400)


def test_links_between_pairs_are_used_as_far_as_the_group_reaches() -> None:
    pairs = (level("host", 8, 448e9, direct=True), HOSTS[1])
    assert seconds("all_gather", GIGA, RankGroup(8), pairs) == pytest.approx(7 / 8 / 448)
    assert seconds("all_gather", GIGA, RankGroup(2), pairs) == pytest.approx(1 / 2 / 64)
    assert message_over(pairs, GIGA, lambda _: True).value == pytest.approx(1 / 64)


def test_small_messages_take_the_algorithm_with_few_of_them() -> None:
    ring = 7 * 8 * 1e-6 + 7 * 1e-5
    assert seconds("all_gather", 0, RankGroup(64), SLOW) == pytest.approx(7 * 1e-6 + 7 * 1e-5)
    assert seconds("all_gather", 0, RankGroup(64), SLOW) < ring
    assert seconds("all_reduce", 0, RankGroup(64), SLOW) == pytest.approx(2 * (3 * 1e-6 + 3 * 1e-5))
    # A large one goes around the ring, which keeps all links busy at once.
    large = seconds("all_gather", 64 * GIGA, RankGroup(64), SLOW)
    assert large == pytest.approx(63 / 320 + 56 * 1e-6 + 7 * 1e-5)


@given(
    st.sampled_from(KINDS),
    st.sampled_from([2, 4, 8, 16, 64, 512]),
    st.sampled_from([1, 2, 4, 8, 32]),
    st.floats(0, 1e10),
)
def test_more_bytes_and_longer_ways_take_no_less(kind: str, ranks: int, stride: int, nbytes: float) -> None:
    group = RankGroup(ranks, stride)
    found = seconds(kind, nbytes, group, SLOW)
    assert found <= seconds(kind, 2 * nbytes, group, SLOW)
    assert found <= seconds(kind, nbytes, RankGroup(group.ranks, 2 * stride), SLOW) * (1 + 1e-9)


def test_a_collective_is_known_as_well_as_the_worst_level_that_it_uses() -> None:
    known = Number(1e9, MeasureSource.MEASURED)
    levels = (Level("host", 8, known, known), Level("between", 64, known, Number(1e9)))
    assert seconds_over(levels, "all_gather", 1, RankGroup(8)).source is MeasureSource.MEASURED
    assert seconds_over(levels, "all_gather", 1, RankGroup(16)).source is MeasureSource.ASSUMED
    assert seconds_over(levels, "all_gather", 1, RankGroup(2, 8)).source is MeasureSource.ASSUMED
