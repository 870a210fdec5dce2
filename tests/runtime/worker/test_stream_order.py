"""Lists of ranks whose streams are in order are proved; spoiled ones are found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from moaic.ir.graph import Module
from moaic.passes.build import Builder
from moaic.passes.config import Config
from moaic.runtime.comm.device_backend import BEHIND, CpuBackend
from moaic.runtime.comm.process_group_transport import GroupTransport
from moaic.runtime.comm.reshard import RankContext
from moaic.runtime.comm.worker_context import WorkerContext
from moaic.runtime.worker.compile_shares import called_functions
from moaic.runtime.worker.instructions import Instruction, instructions
from moaic.runtime.worker.overlap_and_bucket import arranged
from moaic.runtime.worker.per_rank_order import rank_order
from moaic.runtime.worker.stream_order import (
    Communication,
    DisorderedError,
    check_program,
    check_ranks,
    check_streams,
    communications,
)
from tests.exact.graphs import captured_step
from tests.exact.models import EXAMPLES, MIXTURE

CASES = [
    ("llama", Config(dp=2, micro_batches=2, distribute_param="use")),
    ("llama", Config(tp=2)),
    ("llama", Config(pp=2, micro_batches=2)),
    ("llama", Config(pp=2, micro_batches=2, schedule="zero-bubble")),
    ("llama", Config(cp=2, gather_keys=False)),
    ("llama", Config(dp=2, tp=2, pp=2, micro_batches=2)),
    ("mixture", Config(ep=2, dp=2)),
]

Rows = list[Instruction]


@cache
def builder(model: str) -> Builder:
    return Builder(captured_step({**EXAMPLES, "mixture": MIXTURE}[model]).cast("f32").module)


@cache
def program(model: str, config: Config) -> Module:
    return builder(model).build(config).programs.joint


def unused(*_: object) -> Any:
    raise AssertionError("nothing is carried here")


def listed(module: Module, rank: int) -> tuple[Rows, list[int], list[int]]:
    """The instructions of a rank on GPUs, and the slots that are given to it and wanted of it."""
    backend = CpuBackend()
    transport = GroupTransport(unused, unused, backend, stages=False)
    at, main = module.mesh.coordinates(rank), module.main
    slots = {value: slot for slot, value in enumerate(main.values())}
    steps = rank_order(arranged(main, module.mesh), module.mesh, at, transport.send_slots)
    own = replace(main, ops=tuple(op for _, op in steps))
    context, functions = RankContext(module.mesh, WorkerContext(rank, backend, transport)), called_functions(module)
    found = list(instructions(own, context, functions, dict.fromkeys(functions, unused), slots))
    held = [[slots[value] for value in values if value.type.layout.holds(at)] for values in (own.params, own.results)]
    return found, held[0], held[1]


def exchanged(module: Module, rank: int) -> list[Communication]:
    mesh, main = module.mesh, module.main
    steps = rank_order(arranged(main, mesh), mesh, mesh.coordinates(rank), 0)
    return communications(main, steps, mesh, rank, is_asynchronous=True)


@pytest.mark.parametrize(("model", "config"), CASES, ids=str)
def test_the_lists_of_plans_are_in_order(model: str, config: Config) -> None:
    module = program(model, config)
    check_program(module.main, arranged(module.main, module.mesh), module.mesh, 0)
    for rank in range(module.mesh.ranks):
        check_streams(*listed(module, rank))


def spoiled(rows: Rows) -> Iterator[tuple[str, Rows]]:
    """The list with one mistake in it, in every place where there can be one."""
    for at, row in enumerate(rows):
        before, after = rows[:at], rows[at + 1 :]
        if row.awaits:
            yield "a wait is removed", [*before, row._replace(awaits=()), *after]
            yield "it waits twice", [*before, row._replace(awaits=(*row.awaits, row.awaits[0])), *after]
        if row.is_async and any(set(row.writes) & set(other.awaits) for other in after):
            yield "nobody knows that it runs", [*before, row._replace(is_async=False), *after]
        for slot in row.frees[:1]:
            yield "memory is kept", [*before, row._replace(frees=row.frees[1:]), *after]
            earlier = [n for n, other in enumerate(before) if slot in other.reads]
            for n in earlier[-1:]:
                early = rows[n]._replace(frees=(*rows[n].frees, slot))
                yield "a buffer is freed early", [*rows[:n], early, *rows[n + 1 :]]
        makers = [n for n, other in enumerate(before) if set(other.writes) & set(row.reads)]
        for n in makers[-1:]:
            yield "it comes before its operand", [*rows[:n], row, *rows[n:at], *after]
        if any(slot >= 0 for slot in row.writes):
            yield "it runs twice", [*before, row, row._replace(reads=(), awaits=(), frees=()), *after]
            yield "it does not run", [*before, row._replace(writes=()), *after]


@pytest.mark.parametrize(("model", "config"), CASES[:5], ids=str)
def test_every_spoiled_list_is_found(model: str, config: Config) -> None:
    found, given, wanted = listed(program(model, config), 0)
    passed = [what for what, rows in spoiled(found) if is_in_order(rows, given, wanted)]
    assert not passed
    assert sum(1 for _ in spoiled(found)) > 50


def is_in_order(rows: Rows, given: Sequence[int], wanted: Sequence[int]) -> bool:
    try:
        check_streams(rows, given, wanted)
    except DisorderedError:
        return False
    return True


def disordered(row: list[Communication]) -> Iterator[list[Communication]]:
    """One rank's list with two exchanges with the same ranks swapped, or with one left out."""
    for at, one in enumerate(row):
        if len(one.ranks) < 2:
            continue
        yield [*row[:at], *row[at + 1 :]]
        other = next((n for n in range(at + 1, len(row)) if row[n].ranks == one.ranks), None)
        if other is not None:
            swapped = list(row)
            swapped[at], swapped[other] = row[other], one
            yield swapped


@pytest.mark.parametrize(("model", "config"), CASES, ids=str)
def test_ranks_that_communicate_in_another_order_are_found(model: str, config: Config) -> None:
    module = program(model, config)
    by_rank = {rank: exchanged(module, rank) for rank in range(module.mesh.ranks)}
    check_ranks(by_rank, 0)
    count = 0
    for row in disordered(by_rank[0]):
        count += 1
        with pytest.raises(DisorderedError, match=r"for ever|in different orders"):
            check_ranks({**by_rank, 0: row}, 0)
    assert count > 5


def test_a_send_waits_for_a_slot() -> None:
    """Two ranks that both send first wait for ever without slots, and not with one."""
    here = [Communication(0, (0, 1), sends=True), Communication(1, (1, 0), receives=True)]
    there = [Communication(1, (1, 0), sends=True), Communication(0, (0, 1), receives=True)]
    check_ranks({0: here, 1: there}, 1)
    with pytest.raises(DisorderedError, match="rank 0 at instruction 0; rank 1 at instruction 1"):
        check_ranks({0: here, 1: there}, 0)


def test_what_is_sent_is_received() -> None:
    sends, receives = Communication(0, (0, 1), sends=True), Communication(0, (0, 1), receives=True)
    together = Communication(0, (0, 1))
    for slots in (0, 1):
        check_ranks({0: [sends], 1: [receives]}, slots)
        for one, other in ((sends, sends), (receives, receives), (together, receives), (sends, together)):
            with pytest.raises(DisorderedError, match="for ever"):
                check_ranks({0: [one], 1: [other]}, slots)


def test_two_groups_that_wait_for_each_other_are_found() -> None:
    """Of two groups that share two ranks, each of these begins with another."""
    one, other = Communication(0, (0, 1, 2)), Communication(1, (0, 1, 3))
    with pytest.raises(DisorderedError, match="wait for each other for ever"):
        check_ranks({0: [one, other], 1: [other, one], 2: [one], 3: [other]}, 0)


def test_one_group_on_two_streams_is_in_one_order() -> None:
    side, first = Communication(0, (0, 1), is_async=True), Communication(1, (0, 1))
    check_ranks({0: [side, first], 1: [side, first]}, 0)
    with pytest.raises(DisorderedError, match=r"the ranks \(0, 1\) communicate in different orders"):
        check_ranks({0: [side, first], 1: [first, side]}, 0)


def test_few_collectives_are_in_flight() -> None:
    """A third one waits for the first, and with it all that comes after it."""
    sides = [Communication(n, (0, 1), is_async=True) for n in range(BEHIND)]
    third, sent, taken = (
        Communication(BEHIND, (0, 1), is_async=True),
        Communication(9, (0, 2), sends=True),
        Communication(9, (0, 2), receives=True),
    )
    late = Communication(10, (2, 1), sends=True), Communication(10, (2, 1), receives=True)
    check_ranks({0: [*sides, sent, third], 1: [late[1], *sides, third], 2: [taken, late[0]]}, 0)
    with pytest.raises(DisorderedError, match="for ever"):
        check_ranks({0: [*sides, third, sent], 1: [late[1], *sides, third], 2: [taken, late[0]]}, 0)


def test_an_empty_list_is_in_order() -> None:
    check_streams([], [0], [0])
    with pytest.raises(DisorderedError, match="the end reads what was freed or never made"):
        check_streams([], [0], [1])
