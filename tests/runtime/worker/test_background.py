"""Programs that run op by op while processes beside the workers compile them, and then run compiled."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from moaic.runtime.controller.accelerator import Accelerator
from moaic.runtime.controller.buffer import whole
from moaic.runtime.controller.launch import launch
from moaic.runtime.worker.background import PATIENCE_SECONDS
from tests.runtime.worker.test_program import up

TEXT = """// moai 1
mesh [dp=2]
func @double(%x: f32[8, 16]) -> (f32[8, 16]) {
  %y = aten.add.Tensor %x, %x : f32[8, 16]
  return %y
}
func @square(%x: f32[8, 16]) -> (f32[8, 16]) {
  %y = aten.mul.Tensor %x, %x : f32[8, 16]
  %z = aten.tanh %y : f32[8, 16]
  return %z
}
func @main(%x: f32[8, 16] input "x") -> (f32[8, 16]) {
  %y = call @double %x : f32[8, 16]
  %z = call @square %y : f32[8, 16]
  return %z
}
"""
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
EXPECTED = (2 * X).square().tanh()
LONG_SECONDS = 120.0


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "compiled"


@pytest.fixture
def two(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    """Two workers, whose compiler has nothing in its cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    accelerator = Accelerator(launch(2, {"MOAI_COMPILE": "1"}))
    yield accelerator
    accelerator.close()


def begun(accelerator: Accelerator) -> int:
    """A program whose compilation has begun, as it has run once."""
    program = accelerator.load(TEXT, background=True)
    assert not accelerator.are_compiled([program])
    assert torch.allclose(ran(accelerator, program, op_by_op=True), EXPECTED)
    return program


def ran(accelerator: Accelerator, program: int, *, op_by_op: bool) -> torch.Tensor:
    result = accelerator.buffer("f32", (8, 16))
    accelerator.run(program, [up(accelerator, X)], [result], op_by_op=op_by_op)
    return accelerator.download(whole(result))


def wait_until(condition: Callable[[], object], seconds: float = LONG_SECONDS) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def files(cache: Path) -> set[Path]:
    """The libraries that the compiler has made."""
    return set(cache.rglob("*.so"))


def processes(cache: Path) -> list[int]:
    """The workers with this cache, their fork server, and the processes that compile for them."""
    word = f"TORCHINDUCTOR_CACHE_DIR={cache}".encode()
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if word in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def test_a_worker_runs_op_by_op_and_then_finds_all_that_is_compiled(
    two: Accelerator, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = begun(two)
    assert not files(cache)
    wait_until(lambda: two.are_compiled([program]))
    compiled = files(cache)
    # Each rank has compiled its share: one of the two functions.
    assert len(compiled) >= 2
    with caplog.at_level(logging.INFO, "moaic"):
        assert torch.allclose(ran(two, program, op_by_op=False), EXPECTED)
    (said,) = caplog.messages
    assert said.startswith("A program is compiled now: 2 functions in the background, ")
    assert said.endswith(" and after 1 run op by op.")
    assert files(cache) == compiled
    seconds = [worker.programs[program].compile for worker in two.stats().workers]
    assert [set(each) for each in seconds] == [{"double", "square"}] * 2
    assert torch.allclose(ran(two, program, op_by_op=True), EXPECTED)
    # What was compiled before is compiled from the first run on.
    two.synchronize()
    again = two.load(TEXT, background=True)
    assert two.are_compiled([again])
    assert torch.allclose(ran(two, again, op_by_op=False), EXPECTED)
    for mark in (cache / "moaic").iterdir():
        mark.unlink()
    assert not two.are_compiled([two.load(TEXT, background=True)])


def test_a_program_that_cannot_be_compiled_goes_on_op_by_op(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    accelerator = Accelerator(launch(2, {"MOAI_COMPILE": "1", "CXX": str(broken)}))
    try:
        program = begun(accelerator)
        wait_until(lambda: accelerator.are_compiled([program]))
        with caplog.at_level(logging.INFO, "moaic"):
            assert torch.allclose(ran(accelerator, program, op_by_op=False), EXPECTED)
        assert not accelerator.are_compiled([program])
        (said,) = caplog.messages
        assert said.startswith("A program runs op by op, as its functions could not be compiled: ")
        assert "another worker" not in said
        assert torch.allclose(ran(accelerator, program, op_by_op=True), EXPECTED)
        assert not list(cache.glob("moaic/*"))
    finally:
        accelerator.close()


def test_a_killed_compiler_is_replaced_by_the_worker(two: Accelerator, cache: Path) -> None:
    two.synchronize()
    known = set(processes(cache))
    program = begun(two)
    wait_until(lambda: set(processes(cache)) - known)
    for pid in set(processes(cache)) - known:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: two.are_compiled([program]))
    assert torch.allclose(ran(two, program, op_by_op=False), EXPECTED)
    assert len(list(cache.glob("moaic/*"))) == 1


ONE_RANK = TEXT.replace("[dp=2]", "[dp=1]")


def test_workers_without_a_part_keep_nobody_waiting(two: Accelerator) -> None:
    programs = [two.load(ONE_RANK.replace("16", width), background=True) for width in ("16", "32")]
    ran(two, programs[0], op_by_op=True)
    for program in programs:
        wait_until(lambda program=program: two.are_compiled([program]), PATIENCE_SECONDS / 2)


def test_a_program_that_waited_for_the_compiler_is_marked_too(two: Accelerator, cache: Path) -> None:
    assert torch.allclose(ran(two, two.load(TEXT), op_by_op=False), EXPECTED)
    assert len(list(cache.glob("moaic/*"))) == 1
    assert two.are_compiled([two.load(TEXT, background=True)])


def test_programs_get_ready_in_their_order_and_those_that_belong_together_at_once(two: Accelerator) -> None:
    first, second = begun(two), two.load(ONE_RANK, background=True)
    assert not two.are_compiled([second])
    wait_until(lambda: two.are_compiled([second]))
    assert two.are_compiled([first])
    assert torch.allclose(ran(two, second, op_by_op=False), EXPECTED)
    others = [two.load(text.replace("tanh", "sin"), background=True) for text in (TEXT, ONE_RANK)]
    assert not two.are_compiled(others)
    wait_until(lambda: two.are_compiled(others))
    for program in others:
        assert torch.allclose(ran(two, program, op_by_op=False), (2 * X).square().sin(), atol=1e-6)
    assert torch.allclose(ran(two, first, op_by_op=False), EXPECTED)


def test_what_does_not_fit_op_by_op_waits(two: Accelerator) -> None:
    program = begun(two)
    assert two.are_compiled([program], at_once=True)
    assert torch.allclose(ran(two, program, op_by_op=False), EXPECTED)


def test_compilers_end_with_their_workers(two: Accelerator, cache: Path) -> None:
    two.synchronize()
    known = set(processes(cache))
    program = begun(two)
    wait_until(lambda: set(processes(cache)) - known)
    assert not two.are_compiled([program])
    two.close()
    wait_until(lambda: not processes(cache), 2.0)
