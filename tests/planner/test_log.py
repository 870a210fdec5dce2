"""What the planner logs: its own lines, and why a plan is selected."""

from __future__ import annotations

import logging

import pytest

from moaic.ir.parser import parse
from moaic.passes.config import Config, Request
from moaic.planner import log, search
from moaic.planner.worker import InProcessPool
from tests.passes.steps import dense, machine
from tests.planner.scripted import SMALL, Scripted

UNRULED = """// moai 1
func @step(%x: f32[8, 512, 256] input "x") -> (f32[8, 512, 256] output "y") {
  %y = other.thing %x : f32[8, 512, 256]
  return %y
}
"""


def test_the_log_says_why_a_plan_is_selected(caplog: pytest.LogCaptureFixture) -> None:
    best, second = Config(dp=2), Config(tp=2)
    for seconds, compiling, why in (
        (1.5, 0.0, "Next best: tp=2, 1.50 x as long: 500 [ms] more on products and attention."),
        (1.0, 0.0, "Next best: tp=2, equal within the error of the prediction, and less simple."),
        (1.0, 200.0, "Next best: tp=2, 1.20 x as long: 200 [s] to compile instead of 0."),
    ):
        caplog.clear()
        pool = Scripted({best: 1.0, second: seconds}, compiling={second: compiling})
        with caplog.at_level(logging.INFO, "moaic"):
            search.search(dense(), machine(), SMALL, pool=pool)
        assert caplog.messages[-2:] == ["It spends: 100% on products and attention.", why]


def test_later_graphs_of_a_model_take_two_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "moaic"), log.of_model(set(), is_first=False):
        search.search(dense(), machine(), SMALL, pool=InProcessPool())
    first, second = caplog.messages
    assert first.startswith("Another graph of this model (train: true) is planned: num_stages : 1, ")
    assert second.startswith("Predicted for a step: ")


def test_the_log_says_each_thing_of_a_model_once(caplog: pytest.LogCaptureFixture) -> None:
    said: set[str] = set()
    unruled = parse(UNRULED)
    with caplog.at_level(logging.INFO, "moaic"):
        for is_first in (True, False, False, False):
            with log.of_model(said, is_first=is_first):
                log.another_program({"s0": 3, "s1": 51, "s2": 3}, "s0 is a multiple of 2")
                search.search(dense(), machine(), SMALL, pool=InProcessPool())
                search.search(unruled, machine(), Request(), pool=InProcessPool())
    said_once = ("Sizes ", "Another graph of this model (train: true)", "`other.thing` has no")
    for beginning in said_once:
        assert len([line for line in caplog.messages if line.startswith(beginning)]) == 1, beginning
    assert "Sizes s0 = s2 = 3, s1 = 51 get a program of their own" in caplog.text
    of_later_graphs = caplog.messages[caplog.messages.index(next(m for m in caplog.messages if "Another" in m)) :]
    assert [line.split(":")[0] for line in of_later_graphs] == [
        "Another graph of this model (train",
        "Predicted for a step",
        "Another graph of this model (train",
        "Predicted for a step",
    ]


def test_another_model_is_told_all_again(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "moaic"):
        for _ in range(2):
            with log.of_model(set(), is_first=False):
                log.another_program({"s0": 3}, "")
    assert caplog.messages == ["Sizes s0 = 3 get a program of their own: the last one is for sizes where it fits."] * 2


def test_the_log_reads_as_people_know_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "moaic"):
        search.search(dense(), machine(), SMALL, pool=InProcessPool())
    lines = [record.getMessage() for record in caplog.records]
    numbers = [line for line in lines if line.startswith("Elapsed")]
    assert [line for line in lines if not line.startswith(("Elapsed", "Predicted", "Optimizer", "It ", "Next"))] == [
        "The number of candidates is 29.",
        "Parallel Graph Compile start...",
        "Parallel Graph Compile finished.",
        "The number of possible candidates is 14.",
        "SelectBestGraphFromCandidates start...",
        "SelectBestGraphFromCandidates finished.",
        "Configuration for parallelism is selected.",
        "num_stages : 1, num_micro_batches : 1, batch_per_device : 8, No TP, recomputation : false, "
        "distribute_param : false",
        "train: true",
    ]
    assert lines.index(numbers[0]) == 2
    assert numbers[0].startswith("Elapsed Time to compile all candidates = ")
    assert numbers[1].startswith("Elapsed Time to compute cost for survived candidates = ")
    assert all(line.endswith(" [ms]") for line in numbers)
    assert any("assumed: 2 values per trainable parameter element, of its type" in line for line in lines)


def test_ops_without_a_rule_are_named_with_their_cost(caplog: pytest.LogCaptureFixture) -> None:
    search.search(parse(UNRULED), machine(), Request(), pool=InProcessPool())
    assert "`other.thing` has no sharding rule: every worker runs it whole (1 uses, 8 [MiB]" in caplog.text
