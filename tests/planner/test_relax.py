"""The decisions of a plan that a step follows if it cannot follow all, and the message about it."""

from __future__ import annotations

import logging
import re
from dataclasses import replace

import pytest

from moaic.capture.pieces import Model, Piece
from moaic.compile import planning
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Location, Module
from moaic.ir.printer import render
from moaic.ir.specialize import symbols_of
from moaic.ir.verify import load
from moaic.passes.config import Config
from moaic.passes.sharding.data_parallel import batch_size
from moaic.planner.relax import dropped_decisions, relax
from moaic.planner.request import parse_request
from tests.passes.steps import dense, evaluation, machine, normalized

pytestmark = pytest.mark.usefixtures("no_accelerator")


@pytest.mark.parametrize(
    ("step", "asked", "kept"),
    [
        (dense(), "dp=2,tp=2,micro_batches=2,recompute=full", "dp=2,tp=2,micro_batches=2,recompute=full"),
        (dense(rows=5), "dp=2,micro_batches=2", "dp=2,micro_batches=2"),
        (dense(rows=1), "dp=2,tp=2", "tp=2"),
        (dense(rows=1), "dp=2,micro_batches=2,recompute=full", "recompute=full"),
        (dense(rows=3), "dp=2,micro_batches=2", "dp=2"),
        (dense(rows=3, width=6), "dp=4,distribute_param=step", "distribute_param=step"),
        (dense(rows=1), "dp=2,distribute_param=step,distribute_low_prec_param=true", ""),
        (dense(rows=1), "pp=2,micro_batches=2,schedule=gpipe", "pp=2,schedule=gpipe"),
        (dense(), "cp=2,dp=2", "dp=2"),
        (dense(), "ep=2,tp=2", "tp=2"),
        (dense(), "loss_chunks=2,dp=2", "dp=2"),
        (dense(width=3, hidden=5), "tp=2,micro_batches=2", "micro_batches=2"),
        (normalized(), "dp=2,micro_batches=4", "dp=2"),
        (evaluation(rows=1), "dp=2,distribute_param=step", "distribute_param=step"),
    ],
)
def test_what_is_possible_is_kept(step: Module, asked: str, kept: str) -> None:
    assert relax(step, machine(4), parse_request(asked)) == parse_request(kept)


def test_what_is_dropped_is_said_as_it_was_asked_for() -> None:
    asked = parse_request("micro_batches=2,dp=2,distribute_low_prec_param=true")
    assert dropped_decisions(asked, parse_request("dp=2")) == "micro_batches=2,distribute_low_prec_param=true"


def planned(step: Module, asked: str, piece: Piece) -> Config:
    return planning.Planning(parse_request(asked), piece).plan(step).config


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_first_whole_graph_is_refused_what_it_cannot_follow(caplog: pytest.LogCaptureFixture) -> None:
    piece = Piece()
    for _ in range(2):
        with pytest.raises(Diagnostic, match="dp=2 makes 2 parts of a batch of 1"):
            planned(dense(rows=1), "dp=2", piece)
    assert not said(caplog)


def test_later_batches_relax_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    piece = Piece()
    assert [planned(dense(rows), "dp=2", piece).dp for rows in (8, 1, 5, 1)] == [2, 1, 2, 1]
    (line,) = said(caplog)
    assert line.startswith("A later batch cannot follow dp=2 and runs under ")
    assert line.endswith(", with the same result: dp=2 makes 2 parts of a batch of 1: at most 1 are possible")


def test_an_evaluation_is_no_proof_that_training_can_follow() -> None:
    piece = Piece()
    assert planned(evaluation(rows=1), "dp=2", piece).dp == 1
    with pytest.raises(Diagnostic, match="dp=2 makes 2 parts of a batch of 1"):
        planned(dense(rows=1), "dp=2", piece)


def test_a_piece_relaxes_and_names_its_place_and_no_batch(caplog: pytest.LogCaptureFixture) -> None:
    piece = Piece(is_whole=False)
    assert [planned(_at("eyes.py", 7, dense(1)), "dp=2", piece).dp for _ in range(2)] == [1, 1]
    assert planned(_at("eyes.py", 9, dense(1)), "dp=2", piece).dp == 1
    assert planned(_at("eyes.py", 11, dense(8)), "dp=2", piece).dp == 2
    first, second = said(caplog)
    assert first.startswith("The graph at eyes.py:7 cannot follow dp=2 and runs under ")
    assert first.endswith(", with the same result: the first tensor that it is given has 1 rows")
    assert second.startswith("The graph at eyes.py:9 ")


def test_what_no_batch_can_follow_is_refused_to_pieces_too() -> None:
    later = Piece(Model(has_followed=True))
    for piece in (later, replace(later, is_whole=False)):
        with pytest.raises(Diagnostic, match="dp=3 needs 3 workers, there are 2"):
            planned(dense(rows=1), "dp=3", piece)


def test_a_variant_that_cannot_have_the_first_ones_plan_relaxes(caplog: pytest.LogCaptureFixture) -> None:
    steps = planning.Planning(parse_request("dp=2"), Piece())
    assert [steps.plan(dense(rows)).config.dp for rows in (8, 1, 8)] == [2, 1, 2]
    assert len(said(caplog)) == 1


def test_an_odd_batch_does_not_decide_for_those_that_divide() -> None:
    steps = planning.Planning(parse_request("dp=2"), Piece(Model(has_followed=True)))
    odd = _of_open_size(dense(rows=7))
    assert steps.plan(odd).config.dp == 1
    symbols = symbols_of(odd)
    assert symbols is not None
    assert symbols.hold([9])
    assert not symbols.hold([8])
    assert steps.plan(_of_open_size(dense(rows=8))).config.dp == 2
    assert steps.plan(_of_open_size(dense(rows=9))).config.dp == 1


def _of_open_size(step: Module) -> Module:
    rows = batch_size(step.main)
    text = re.sub(rf"\b{rows}\b", "s0", render(step))
    return load(text.replace("\n", f"\nsizes s0 = {rows}\n", 1))


def _at(file: str, line: int, step: Module) -> Module:
    place = Location(file, line, "", "forward")
    main = replace(step.main, ops=tuple(replace(op, loc=place) for op in step.main.ops))
    return Module((*step.functions[:-1], main), step.mesh)
