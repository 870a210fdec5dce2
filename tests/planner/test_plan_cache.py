"""Selections on disk: found again where nothing that matters has changed, made anew otherwise."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from moaic.ir.parser import parse
from moaic.ir.printer import render
from moaic.passes.config import Config, Request
from moaic.planner import plan_cache, search
from moaic.planner.worker import InProcessPool
from tests.passes.steps import dense, machine
from tests.planner.scripted import SMALL, Scripted


def test_what_compiles_fast_is_for_few_steps(tmp_path: Path) -> None:
    fast, soon = Config(dp=2), Config(tp=2)
    pool = Scripted({fast: 0.9, soon: 1.0}, compiling={fast: 50.0, soon: 1.0})
    for steps, chosen in ((1000, fast), (100, soon), (1000, fast)):
        found = plan_cache.search_cached(dense(), machine(), SMALL, pool=pool, folder=tmp_path, steps=steps)
        assert found.plan.config == found.search_result.ranked[0].config == chosen


def test_a_planner_is_known_by_every_file_of_it(tmp_path: Path) -> None:
    """Also by those in folders within: plans of another planner are not found again."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "one.py").write_text("1", encoding="utf-8")
    first = plan_cache.sources_hash(tmp_path)
    (tmp_path / "inner" / "one.py").write_text("2", encoding="utf-8")
    second = plan_cache.sources_hash(tmp_path)
    (tmp_path / "inner" / "one.py").rename(tmp_path / "one.py")
    assert len({first, second, plan_cache.sources_hash(tmp_path)}) == 3


def test_an_outcome_is_found_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    step, where = dense(), machine()
    assert not plan_cache.has_plans(tmp_path)
    first = plan_cache.search_cached(step, where, SMALL, pool=InProcessPool(), folder=tmp_path)
    assert plan_cache.has_plans(tmp_path)
    with caplog.at_level(logging.INFO, "moaic"):
        second = plan_cache.search_cached(step, where, SMALL, pool=Scripted({}), folder=tmp_path)
    assert second.search_result == first.search_result
    assert render(second.plan.module) == render(first.plan.module)
    assert "planned before" in caplog.text
    assert "num_stages : 1" in caplog.text


def test_another_outcome_can_take_its_place(tmp_path: Path) -> None:
    step, where = dense(), machine()
    first = plan_cache.search_cached(step, where, SMALL, pool=InProcessPool(), folder=tmp_path).search_result
    other = replace(first, selected=first.ranked[1].config)
    plan_cache.remember(step, where, SMALL, other, folder=tmp_path)
    found = plan_cache.search_cached(step, where, SMALL, pool=Scripted({}), folder=tmp_path)
    assert found.plan.config == other.selected != first.selected


def test_everything_that_matters_is_in_the_fingerprint() -> None:
    step, where, request = dense(), machine(), SMALL
    others = [
        plan_cache.fingerprint(dense(rows=16), where, request),
        plan_cache.fingerprint(step, machine(workers=4), request),
        plan_cache.fingerprint(step, where, Request(dp=2)),
    ]
    assert plan_cache.fingerprint(parse(render(step)), where, request) == plan_cache.fingerprint(step, where, request)
    assert len({plan_cache.fingerprint(step, where, request), *others}) == 4


def test_a_damaged_outcome_is_made_anew(tmp_path: Path) -> None:
    step, where = dense(), machine()
    first = plan_cache.search_cached(step, where, SMALL, pool=InProcessPool(), folder=tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text(encoding="utf-8")[:50], encoding="utf-8")
    assert (
        plan_cache.search_cached(step, where, SMALL, pool=InProcessPool(), folder=tmp_path).search_result
        == first.search_result
    )


def test_a_folder_that_cannot_be_written_to_is_no_reason_to_fail(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = plan_cache.search_cached(dense(), machine(), SMALL, pool=InProcessPool(), folder=tmp_path / "file")
    assert found.plan.config == Config()


def test_outcomes_are_plain_json() -> None:
    found = search.search(dense(), machine(), SMALL, pool=InProcessPool())
    text = plan_cache.to_text(found.search_result)
    assert json.loads(text)["selected"]["dp"] == found.plan.config.dp
    assert plan_cache.from_text(text) == found.search_result
