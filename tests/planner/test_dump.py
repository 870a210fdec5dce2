"""The folder that MOAI_DUMP names."""

from __future__ import annotations

from pathlib import Path

import pytest

from moaic.ir.errors import Diagnostic
from moaic.ir.parser import parse
from moaic.passes.config import Request
from moaic.passes.perf import machine_text
from moaic.planner import evaluation, search
from moaic.planner.dump import dump
from moaic.planner.worker import InProcessPool
from tests.passes.steps import dense, machine
from tests.planner.scripted import SMALL


def test_a_dump_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    step = dense()
    with pytest.raises(Diagnostic, match=r"MOAI_DUMP: .* cannot be written: "):
        dump(tmp_path / "file", step, search.search(step, machine(), SMALL, pool=InProcessPool()))


def test_the_dump_can_be_read_and_parsed(tmp_path: Path) -> None:
    step = dense()
    found = search.search(step, machine(), Request(), pool=InProcessPool())
    folder = dump(tmp_path, step, found)
    for name in ("graph.moai", "plan.moai", "joint.moai", "forward.moai", "backward.moai"):
        parse((folder / name).read_text(encoding="utf-8"))
    table = (folder / "candidates.txt").read_text(encoding="utf-8")
    assert table.startswith("selected: num_stages : 1")
    assert evaluation.NOT_NEEDED in table
    assert machine_text.from_text((folder / "machine.json").read_text(encoding="utf-8")) == machine()
    assert dump(tmp_path, step, found) == folder
