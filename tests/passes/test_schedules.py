"""Schedules of pipelines: the named ones, and lists written by users."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moaic.ir.errors import Diagnostic
from moaic.passes.schedules import SCHEDULES, Action, Schedule, least_stretch, parse_schedule, schedule_of

NAMES = [*SCHEDULES, "interleaved:3"]


@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 4))
def test_every_named_schedule_is_complete_and_never_blocks(name: str, workers: int, rounds: int) -> None:
    schedule = schedule_of(name, workers, workers * rounds)
    kinds = "FBW" if name == "zero-bubble" else "FB"
    stages = workers * {"interleaved": 2, "interleaved:3": 3}.get(name, 1)
    wanted = {
        Action(kind, stage, part) for kind in kinds for stage in range(stages) for part in range(workers * rounds)
    }
    assert set(schedule.merged) == wanted
    assert len(schedule.merged) == len(wanted)
    assert parse_schedule(str(schedule)) == schedule


@given(st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 4))
def test_no_schedule_waits_less_than_its_bound(name: str, workers: int, rounds: int) -> None:
    stretch = schedule_of(name, workers, workers * rounds).stretch
    assert least_stretch(name, workers, workers * rounds) <= stretch * (1 + 1e-9)


@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_that_take_equally_long_take_what_the_stretch_says(name: str) -> None:
    schedule = schedule_of(name, 4, 8)
    stages, parts = schedule.stages, 8
    whole = stages * parts / 4
    assert schedule.seconds([1.0] * stages) == pytest.approx(whole * schedule.stretch)
    longest_last = [1.0] * (stages - 1) + [3.0]
    assert schedule.seconds(longest_last) >= parts * (3.0 + stages / 4 - 1)


@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 4), st.data())
def test_seconds_are_those_of_actions_that_start_once_they_can(
    name: str, workers: int, rounds: int, data: st.DataObject
) -> None:
    schedule = schedule_of(name, workers, workers * rounds)
    seconds = [data.draw(st.floats(0, 5)) for _ in range(schedule.stages)]
    units = {"F": 1, "B": 1, "W": 1} if schedule.splits_backward else {"F": 1, "B": 2}
    ends: dict[Action, float] = {}
    clock = [0.0] * workers
    for action in schedule.merged:
        worker = schedule.owners[action.stage]
        needs = [Action("F", action.stage - 1, action.part)] if action.kind == "F" else []
        needs += [Action("F", action.stage, action.part)] if action.kind == "B" else []
        needs += [Action("B", action.stage + 1, action.part)] if action.kind == "B" else []
        needs += [Action("B", action.stage, action.part)] if action.kind == "W" else []
        start = max(clock[worker], *(ends.get(need, 0.0) for need in needs), 0.0)
        clock[worker] = ends[action] = start + seconds[action.stage] * units[action.kind] / sum(units.values())
    assert schedule.seconds(seconds) == pytest.approx(max(clock))


@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 4), st.data())
def test_live_states_have_the_most_that_any_action_leaves(
    name: str, workers: int, rounds: int, data: st.DataObject
) -> None:
    schedule = schedule_of(name, workers, workers * rounds)
    saved, sums = (data.draw(st.lists(st.integers(0, 9), min_size=2 * 3 * 5, max_size=2 * 3 * 5)) for _ in range(2))
    last = "W" if schedule.splits_backward else "B"
    for actions, states in zip(schedule.workers, schedule.live_states, strict=True):
        live = most = 0
        left = [sum(action.kind == last and action.stage == stage for action in actions) for stage in range(30)]
        begun: set[int] = set()
        for action in actions:
            live += saved[action.stage] * ((action.kind == "F") - (action.kind == "B"))
            if action.kind == last:
                live += 0 if action.stage in begun else 2 * sums[action.stage]
                begun.add(action.stage)
            most = max(most, live)
            left[action.stage] -= action.kind == last
            # Half of the sums is kept once they are complete.
            live -= sums[action.stage] if action.kind == last and not left[action.stage] else 0
        found = [
            sum(
                unfinished * saved[stage] + begun * (1 if finished else 2) * sums[stage]
                for stage, unfinished, begun, finished in zip(
                    state.stages, state.unfinished, state.begun, state.finished, strict=True
                )
            )
            for state in states
        ]
        assert max(found) == most


@given(st.sampled_from(NAMES), st.integers(1, 4), st.integers(1, 4))
def test_the_one_order_of_all_is_that_of_every_worker_and_waits_for_what_it_needs(
    name: str, workers: int, rounds: int
) -> None:
    schedule = schedule_of(name, workers, workers * rounds)
    place = {action: index for index, action in enumerate(schedule.merged)}
    for actions in schedule.workers:
        assert [place[action] for action in actions] == sorted(place[action] for action in actions)
    for action in schedule.merged:
        if action.kind == "F" and action.stage:
            assert place[Action("F", action.stage - 1, action.part)] < place[action]
        if action.kind == "B":
            assert place[Action("F", action.stage, action.part)] < place[action]
            if action.stage + 1 < schedule.stages:
                assert place[Action("B", action.stage + 1, action.part)] < place[action]


@given(st.integers(1, 6), st.integers(1, 12))
def test_1f1b_keeps_no_more_micro_batches_than_there_are_stages_below(workers: int, parts: int) -> None:
    for name in ("1f1b", "zero-bubble"):
        schedule = schedule_of(name, workers, parts)
        assert [schedule.live(worker) for worker in range(workers)] == [min(parts, workers - w) for w in range(workers)]
    assert schedule_of("gpipe", workers, parts).live(0) == parts


def spans(schedule: Schedule) -> int:
    """When the last action ends if a forward takes 1, a backward 2 and half of one 1."""
    half = schedule.splits_backward
    done: dict[Action, int] = {}
    clock = [0] * len(schedule.workers)
    for action in schedule.merged:
        worker = schedule.owners[action.stage]
        needs = [Action("F", action.stage - 1, action.part), Action("B", action.stage + 1, action.part)]
        before = needs[:1] if action.kind == "F" else needs[1:]
        start = max([clock[worker], *(done[need] for need in before if need in done)])
        clock[worker] = done[action] = start + (2 if action.kind == "B" and not half else 1)
    return max(clock)


def test_bubbles_are_what_they_are_known_to_be() -> None:
    workers, parts = 4, 8
    ideal = 3 * parts
    assert spans(schedule_of("gpipe", workers, parts)) == ideal + 3 * (workers - 1)
    assert spans(schedule_of("1f1b", workers, parts)) == ideal + 3 * (workers - 1)
    # Stages of half the size: half the time of each of twice as many actions.
    assert spans(schedule_of("interleaved", workers, parts)) / 2 < ideal + 3 * (workers - 1)
    assert spans(schedule_of("zero-bubble", workers, parts)) < ideal + 3 * (workers - 1)


def test_a_list_that_somebody_wrote_is_a_schedule() -> None:
    schedule = parse_schedule("""
        F0.0 F0.1 B0.1 B0.0   # the last micro-batch first
        F1.1 B1.1 F1.0 B1.0
    """)
    assert (schedule.stages, schedule.parts, schedule.owners) == (2, 2, (0, 1))
    assert [schedule.live(0), schedule.live(1)] == [2, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0.0 B0.0 / B1.0 F1.0", "blocks: worker 0 waits with B0.0 for B1.0; worker 1 waits with B1.0 for F1.0"),
        ("F0.0 B0.0 / F1.0 F1.0 B1.0", "runs F1.0 2 times"),
        ("F0.0 B0.0 / F1.0", "never runs B1.0"),
        ("F0.0 F0.2 B0.0 B0.2", "never runs F0.1"),
        ("F0.0 W0.0", "no backward (B)"),
        ("F0.0 B0.0 F1.0 / B1.0", "stage 1 stands in the lists of workers 0, 1"),
        ("F0.0 B0.0 F0", "`F0` is not an action"),
        ("# nothing", "needs a list of actions"),
    ],
)
def test_a_list_that_is_no_schedule_says_why(text: str, message: str) -> None:
    with pytest.raises(Diagnostic) as error:
        parse_schedule(text)
    assert message in str(error.value)


def test_a_schedule_must_go_with_the_plan() -> None:
    with pytest.raises(Diagnostic, match="rounds of 2, and 3 are no multiple"):
        schedule_of("interleaved", 2, 3)
    with pytest.raises(Diagnostic, match="for 1 workers and 1 micro-batches, the plan has pp=2 and micro_batches=4"):
        schedule_of("F0.0 B0.0", 2, 4)


def test_a_worker_without_actions_is_no_worker_of_a_schedule() -> None:
    with pytest.raises(Diagnostic, match="needs a list of actions for each worker"):
        Schedule((schedule_of("1f1b", 1, 2).workers[0], ()))
