"""Pipeline schedules as data: for each worker the list of its actions, one per stage and micro-batch.

`F1.3` is the forward of stage 1 on micro-batch 3, `B1.3` its backward, `W1.3` the part of the backward that makes the
gradients of parameters where it is split off. The user may write such lists; every list that proves complete and free
of deadlock here is a schedule.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import heappop, heappush

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.passes.loop_axes import MICRO_BATCHES

UNITS: Mapping[str, int] = {"F": 2, "B": 4, "W": 2}
"""Assumed duration of each kind of action: a backward is twice a forward, half of it for parameters."""

STAGES_PER_WORKER = 2
"""Default of an interleaved schedule."""

_ACTION = re.compile(r"([FBW])(\d+)\.(\d+)")
_INTERLEAVED = re.compile(r"interleaved:([1-9]\d*)")


@dataclass(frozen=True, slots=True)
class Action:
    """One stage's forward (F), backward (B) or gradients of parameters (W) on one micro-batch."""

    kind: str
    stage: int
    part: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.part}"


def _needs(action: Action, stages: int) -> list[Action]:
    """The actions that must end before an action can start."""
    kind, stage, part = action.kind, action.stage, action.part
    if kind == "F":
        return [Action("F", stage - 1, part)] if stage else []
    if kind == "W":
        return [Action("B", stage, part)]
    above = [Action("B", stage + 1, part)] if stage + 1 < stages else []
    return [Action("F", stage, part), *above]


@dataclass(frozen=True, slots=True)
class LiveState:
    """What a worker holds after an action, by its stages in order."""

    stages: tuple[int, ...]
    unfinished: tuple[int, ...]
    """Forwards whose backward has not run."""
    begun: tuple[bool, ...]
    """Whether gradients of parameters have been made."""
    finished: tuple[bool, ...]
    """Whether all of these had been made before the action."""


def _live_states(actions: Sequence[Action]) -> Iterator[LiveState]:
    stages = tuple(sorted({action.stage for action in actions}))
    last = "W" if any(action.kind == "W" for action in actions) else "B"
    left = Counter(action.stage for action in actions if action.kind == last)
    unfinished, begun = dict.fromkeys(stages, 0), dict.fromkeys(stages, False)
    finished = dict(begun)
    for action in actions:
        unfinished[action.stage] += (action.kind == "F") - (action.kind == "B")
        begun[action.stage] |= action.kind == last
        yield LiveState(stages, tuple(unfinished.values()), tuple(begun.values()), tuple(finished.values()))
        left[action.stage] -= action.kind == last
        finished[action.stage] = not left[action.stage]


def _largest(states: Iterable[LiveState]) -> Sequence[LiveState]:
    """Those with the most unfinished forwards among states that are alike otherwise."""
    kept: dict[tuple[bool, ...], list[LiveState]] = defaultdict(list)
    for state in dict.fromkeys(states):
        alike = kept[*state.begun, *state.finished]
        if not any(_covers(other, state) for other in alike):
            alike[:] = [other for other in alike if not _covers(state, other)]
            alike.append(state)
    return [state for alike in kept.values() for state in alike]


def _covers(state: LiveState, other: LiveState) -> bool:
    return all(more >= less for more, less in zip(state.unfinished, other.unfinished, strict=True))


@dataclass(frozen=True)
class Schedule:
    """The actions of each worker of a pipeline, in order. Raises Diagnostic for incomplete lists and deadlocks."""

    workers: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        _check_complete(self)
        _ = self._ends

    @cached_property
    def stages(self) -> int:
        return 1 + max(action.stage for action in self._all)

    @cached_property
    def parts(self) -> int:
        """Number of micro-batches."""
        return 1 + max(action.part for action in self._all)

    @cached_property
    def splits_backward(self) -> bool:
        return any(action.kind == "W" for action in self._all)

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """By stage, the worker that runs it."""
        workers = {action.stage: worker for worker, actions in enumerate(self.workers) for action in actions}
        return tuple(workers[stage] for stage in range(self.stages))

    @property
    def _all(self) -> Iterator[Action]:
        return (action for actions in self.workers for action in actions)

    @property
    def merged(self) -> tuple[Action, ...]:
        """All actions in the order in which they would start, each after the actions that it needs.

        Such an order proves that there is no deadlock: workers that communicate in the order of one list cannot block
        each other.
        """
        return tuple(self._ends)

    @property
    def stretch(self) -> float:
        """The duration of the schedule divided by that without any waiting."""
        busy = sum(map(self._units, self._all))
        return max(self._ends.values()) * len(self.workers) / busy

    def seconds(self, of_stages: Sequence[float]) -> float:
        """The duration of the schedule if stages take so many seconds for a micro-batch, forward and backward."""
        of_units = [seconds / self._units_of_a_stage for seconds in of_stages]
        ends: list[float] = []
        clock = [0.0] * len(self.workers)
        for worker, stage, units, needs in self._merged_places:
            start = max([clock[worker], *(ends[place] for place in needs)])
            clock[worker] = start + units * of_units[stage]
            ends.append(clock[worker])
        return max(clock)

    @cached_property
    def _units_of_a_stage(self) -> int:
        """Units of all actions of a stage on one micro-batch."""
        return sum(self._units(Action(kind, 0, 0)) for kind in {action.kind for action in self._all})

    @cached_property
    def _merged_places(self) -> Sequence[tuple[int, int, int, Sequence[int]]]:
        """By action in `merged` order: its worker, stage and units, and the places of the actions that it needs."""
        places = {action: place for place, action in enumerate(self._ends)}
        return [
            (
                self.owners[action.stage],
                action.stage,
                self._units(action),
                [places[need] for need in _needs(action, self.stages)],
            )
            for action in places
        ]

    @cached_property
    def _ends(self) -> Mapping[Action, float]:
        """The time at which each action would end, in the order in which they would start."""
        done: dict[Action, float] = {}
        clock = [0.0] * len(self.workers)
        place = [0] * len(self.workers)
        waiting: dict[Action, list[int]] = defaultdict(list)
        """By action that has not ended, the workers whose next action needs it."""
        ready: list[tuple[float, int]] = []

        def look_at(worker: int) -> None:
            """Makes the next action of a worker ready, or has it wait."""
            if place[worker] == len(self.workers[worker]):
                return
            needs = _needs(self.workers[worker][place[worker]], self.stages)
            missing = next((need for need in needs if need not in done), None)
            if missing is None:
                heappush(ready, (max([clock[worker], *(done[need] for need in needs)]), worker))
            else:
                waiting[missing].append(worker)

        for worker in range(len(self.workers)):
            look_at(worker)
        while ready:
            start, worker = heappop(ready)
            action = self.workers[worker][place[worker]]
            clock[worker] = done[action] = start + self._units(action)
            place[worker] += 1
            for other in (worker, *waiting.pop(action, ())):
                look_at(other)
        stuck = [
            (worker, actions[place[worker]])
            for worker, actions in enumerate(self.workers)
            if place[worker] < len(actions)
        ]
        if stuck:
            raise _deadlock([(worker, action, _needs(action, self.stages)) for worker, action in stuck], done)
        return done

    def _units(self, action: Action) -> int:
        return UNITS["W"] if action.kind == "B" and self.splits_backward else UNITS[action.kind]

    def live(self, worker: int) -> int:
        """Largest number of micro-batches whose activations a worker holds at once."""
        return self._most_between(worker, "W" if self.splits_backward else "B")

    def unfinished(self, worker: int) -> int:
        """Largest number of forwards on a worker whose backward has not run."""
        return self._most_between(worker, "B")

    def _most_between(self, worker: int, last: str) -> int:
        kept = peak = 0
        for action in self.workers[worker]:
            kept += (action.kind == "F") - (action.kind == last)
            peak = max(peak, kept)
        return peak

    @cached_property
    def live_states(self) -> Sequence[Sequence[LiveState]]:
        """By worker, what it holds after its actions; without those that hold less than others."""
        return [_largest(_live_states(actions)) for actions in self.workers]

    @property
    def rows(self) -> tuple[str, ...]:
        """The text of each worker's list."""
        return tuple(" ".join(map(str, actions)) for actions in self.workers)

    def __str__(self) -> str:
        return " / ".join(self.rows)


def part_by_part(schedule: Schedule, parts: int) -> tuple[Action, ...]:
    """The actions of the first micro-batches, one after another: what estimates look at instead of the schedule."""
    stages = range(schedule.stages)
    kinds = {action.kind for actions in schedule.workers for action in actions}
    orders = [("F", stages), ("B", reversed(stages)), ("W", reversed(stages))]
    in_part = [(kind, stage) for kind, order in orders if kind in kinds for stage in order]
    return tuple(Action(kind, stage, part) for part in range(parts) for kind, stage in in_part)


def parse_schedule(text: str) -> Schedule:
    """A schedule from its text: workers' lists divided by `/` or by lines, `#` beginning a comment."""
    lines = [line.partition("#")[0] for line in text.splitlines()]
    lists = [part.split() for line in lines for part in line.split("/")]
    return Schedule(tuple(tuple(map(_action, words)) for words in lists if words))


def schedule_in(module: Module) -> Schedule | None:
    """The schedule in the text of a module; None without one. Raises Diagnostic where it is invalid, or another's."""
    if not module.schedule:
        return None
    schedule = _of_rows(module.schedule)
    found, wanted = (schedule.stages, schedule.parts), (module.mesh.size("pp"), module.mesh.size(MICRO_BATCHES))
    if found != wanted:
        raise Diagnostic(
            "the schedule is for pp={} and mb={}, the plan has pp={} and mb={}".format(*found, *wanted),
            hint="it is a list for each worker, with an action for each of its stages and micro-batches",
        )
    return schedule


@lru_cache(maxsize=64)
def _of_rows(rows: tuple[str, ...]) -> Schedule:
    """The schedule in these rows, cached: passes read it often, and each construction checks it."""
    return parse_schedule("\n".join(rows))


def is_schedule_text(text: str) -> bool:
    return _ACTION.match(text.strip()) is not None


def _action(word: str) -> Action:
    match = _ACTION.fullmatch(word)
    if match is None:
        raise Diagnostic(f"`{word}` is not an action of a schedule", hint="write for example F0.2, B0.2 or W0.2")
    return Action(match[1], int(match[2]), int(match[3]))


def _check_complete(schedule: Schedule) -> None:
    if not schedule.workers or not all(schedule.workers):
        raise Diagnostic("a schedule needs a list of actions for each worker")
    counts = Counter(action for actions in schedule.workers for action in actions)
    for action, count in counts.items():
        if count > 1:
            raise Diagnostic(f"the schedule runs {action} {count} times")
    kinds = {action.kind for action in counts}
    wanted = ["F", *sorted(kinds - {"F"})] if kinds - {"F"} else ["F"]
    if "W" in wanted and "B" not in wanted:
        raise Diagnostic("the schedule has gradients of parameters (W) and no backward (B)")
    owners: dict[int, set[int]] = defaultdict(set)
    for worker, actions in enumerate(schedule.workers):
        for action in actions:
            owners[action.stage].add(worker)
    for stage in range(schedule.stages):
        for kind in wanted:
            missing = [part for part in range(schedule.parts) if Action(kind, stage, part) not in counts]
            if missing:
                raise Diagnostic(f"the schedule never runs {Action(kind, stage, missing[0])}")
        if len(owners[stage]) > 1:
            raise Diagnostic(
                f"stage {stage} stands in the lists of workers {', '.join(map(str, sorted(owners[stage])))}"
            )


def _deadlock(heads: Sequence[tuple[int, Action, list[Action]]], done: Mapping[Action, float]) -> Diagnostic:
    waiting = [
        f"worker {worker} waits with {action} for {next(need for need in needs if need not in done)}"
        for worker, action, needs in heads
    ]
    return Diagnostic(f"the schedule blocks: {'; '.join(waiting)}")


def is_schedule_name(name: str) -> bool:
    return name in SCHEDULES or _INTERLEAVED.fullmatch(name) is not None


@lru_cache(maxsize=128)
def schedule_of(name: str, workers: int, parts: int) -> Schedule:
    """The schedule of this name or text. Raises Diagnostic where it is for other numbers of workers or parts."""
    if is_schedule_text(name):
        schedule = parse_schedule(name)
        if (len(schedule.workers), schedule.parts) != (workers, parts):
            raise Diagnostic(
                f"the schedule is for {len(schedule.workers)} workers and {schedule.parts} micro-batches, "
                f"the plan has pp={workers} and micro_batches={parts}"
            )
        return schedule
    match = _INTERLEAVED.fullmatch(name)
    if match is not None:
        return interleaved(workers, workers * int(match[1]), parts)
    if name not in SCHEDULES:
        raise Diagnostic(f"there is no schedule `{name}`", hint=f"choose one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name](workers, parts)


def least_stretch(name: str, workers: int, parts: int) -> float:
    """A lower bound on the `stretch` of a schedule by name; a text may be of any schedule, and has the bound one.

    The last worker waits for a forward on each of the others. Where no backward is split, each of the others also runs
    a backward after the last one of that worker. These are shorter where a worker has more stages.
    """
    if workers == 1 or name not in SCHEDULES:
        return 1.0
    stages = STAGES_PER_WORKER if name == "interleaved" else 1
    share = UNITS["F"] / (UNITS["F"] + UNITS["B"]) if name == "zero-bubble" else 1.0
    return 1 + share * (workers - 1) / (stages * parts)


def gpipe(workers: int, parts: int) -> Schedule:
    """All forwards, then all backwards."""
    rows = [[*_row("F", stage, parts), *_row("B", stage, parts)] for stage in range(workers)]
    return Schedule(tuple(map(tuple, rows)))


def one_f_one_b(workers: int, parts: int) -> Schedule:
    """As many forwards as later stages, then alternately one forward and one backward (PipeDream-Flush)."""
    rows = [_in_turn(_row("F", s, parts), _row("B", s, parts), workers - s - 1) for s in range(workers)]
    return Schedule(tuple(map(tuple, rows)))


def interleaved(workers: int, stages: int, parts: int) -> Schedule:
    """Several stages per worker, micro-batches in rounds of the number of workers (Megatron-LM, 2021)."""
    if parts % workers:
        raise Diagnostic(
            f"an interleaved schedule takes micro-batches in rounds of {workers}, and {parts} are no multiple of that"
        )
    chunks = stages // workers
    rows: list[Sequence[Action]] = []
    for worker in range(workers):
        forwards = [Action("F", chunk * workers + worker, part) for chunk, part in _rounds(workers, chunks, parts)]
        backwards = [
            Action("B", (chunks - 1 - chunk) * workers + worker, part)
            for chunk, part in _rounds(workers, chunks, parts)
        ]
        rows.append(_in_turn(forwards, backwards, 2 * (workers - worker - 1) + (chunks - 1) * workers))
    return Schedule(tuple(map(tuple, rows)))


def _rounds(workers: int, chunks: int, parts: int) -> Iterator[tuple[int, int]]:
    for first in range(0, parts, workers):
        for chunk in range(chunks):
            yield from ((chunk, first + offset) for offset in range(workers))


def _row(kind: str, stage: int, parts: int) -> list[Action]:
    return [Action(kind, stage, part) for part in range(parts)]


def _in_turn(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> list[Action]:
    ahead = min(ahead, len(forwards))
    row = list(forwards[:ahead])
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        row += [forward, backward]
    return row + list(backwards[len(forwards) - ahead :])


def zero_bubble(workers: int, parts: int) -> Schedule:
    """1F1B with the gradients of parameters split off and run where a worker would wait (Qi et al. 2023, ZB-H1).

    No worker holds more micro-batches than under 1F1B.
    """
    rows: list[list[Action]] = [[] for _ in range(workers)]
    finished: dict[Action, int] = {}
    clock = [0] * workers
    todo = [{"F": _row("F", s, parts), "B": _row("B", s, parts), "W": _row("W", s, parts)} for s in range(workers)]
    choices: dict[int, tuple[int, int, Action]] = {}
    changed: Iterable[int] = range(workers)
    while True:
        for worker in changed:
            choices.pop(worker, None)
            if (option := _next_of(worker, workers, todo[worker], finished, clock[worker])) is not None:
                choices[worker] = option
        if not choices:
            return Schedule(tuple(map(tuple, rows)))
        worker = min(choices, key=lambda each: (*choices[each][:2], each))
        start, _, action = choices[worker]
        todo[worker][action.kind].pop(0)
        rows[worker].append(action)
        clock[worker] = finished[action] = start + UNITS["W"]
        # Only the neighbors of a stage wait for it.
        changed = range(max(worker - 1, 0), min(worker + 2, workers))


def _next_of(
    stage: int, stages: int, todo: Mapping[str, list[Action]], finished: Mapping[Action, int], now: int
) -> tuple[int, int, Action] | None:
    """The next action of a worker: the earliest start; of equals a backward, a forward within the limit, then W."""
    options: list[tuple[int, int, Action]] = []
    for rank, kind in enumerate("BFW"):
        if not todo[kind]:
            continue
        action = todo[kind][0]
        needs = _needs(action, stages)
        if any(need not in finished for need in needs):
            continue
        if kind == "F" and len(todo["W"]) - len(todo["F"]) >= stages - stage:
            continue
        options.append((max([now, *(finished[need] for need in needs)]), rank, action))
    return min(options, key=lambda choice: choice[:2]) if options else None


SCHEDULES: Mapping[str, Callable[[int, int], Schedule]] = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "interleaved": lambda workers, parts: interleaved(workers, STAGES_PER_WORKER * workers, parts),
    "zero-bubble": zero_bubble,
}
"""By name, the schedule for numbers of workers and micro-batches. `interleaved:3` has three stages per worker."""


def forwards_only(schedule: Schedule) -> Schedule:
    """The forwards of a schedule, for a step without a backward."""
    return Schedule(tuple(tuple(action for action in row if action.kind == "F") for row in schedule.workers))
