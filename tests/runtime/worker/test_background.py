"""Programs that run op by op while processes beside the workers compile them, and then run compiled."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
X = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))


def x_of(width: int) -> torch.Tensor:
    return X[:, :width].contiguous()


def expected(width: int) -> torch.Tensor:
    return (2 * x_of(width)).square().tanh()


EXPECTED = expected(16)
LONG_SECONDS = 120.0


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "compiled"


@contextmanager
def workers_with(cache: Path, **variables: str) -> Generator[Accelerator]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
        accelerator = Accelerator(launch(2, {"MOAI_COMPILE": "1", **variables}))
        try:
            yield accelerator
        finally:
            accelerator.close()


@dataclass(frozen=True)
class Shared:
    """Workers that several tests use, each with functions of its own: to import the compiler takes seconds."""

    workers: Accelerator
    cache: Path


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    cache = tmp_path_factory.mktemp("compiled")
    with workers_with(cache) as accelerator:
        yield Shared(accelerator, cache)


def sized(text: str, width: int) -> str:
    return text.replace("16]", f"{width}]")


def begun(accelerator: Accelerator, width: int = 16) -> int:
    """A program whose compilation has begun, as it has run once."""
    program = accelerator.load(sized(TEXT, width), background=True)
    assert not accelerator.are_compiled([program])
    assert torch.allclose(ran(accelerator, program, width, op_by_op=True), expected(width))
    return program


def ran(accelerator: Accelerator, program: int, width: int = 16, *, op_by_op: bool) -> torch.Tensor:
    result = accelerator.buffer("f32", (8, width))
    accelerator.run(program, [up(accelerator, x_of(width))], [result], op_by_op=op_by_op)
    return accelerator.download(whole(result))


def wait_until(condition: Callable[[], object], seconds: float = LONG_SECONDS) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def files(cache: Path) -> set[Path]:
    """The libraries that the compiler has made."""
    return set(cache.rglob("*.so"))


def marks(cache: Path) -> set[Path]:
    """Those of programs that are compiled."""
    return set(cache.glob("moaic/*"))


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
    shared: Shared, caplog: pytest.LogCaptureFixture
) -> None:
    workers, cache, width = shared.workers, shared.cache, 40
    before, marked = files(cache), marks(cache)
    program = begun(workers, width)
    assert files(cache) == before
    wait_until(lambda: workers.are_compiled([program]))
    compiled = files(cache)
    # Each rank has compiled its share: one of the two functions.
    assert len(compiled - before) >= 2
    with caplog.at_level(logging.INFO, "moaic"):
        assert torch.allclose(ran(workers, program, width, op_by_op=False), expected(width))
    (said,) = caplog.messages
    assert said.startswith("A program is compiled now: 2 functions in the background, ")
    assert said.endswith(" and after 1 run op by op.")
    assert files(cache) == compiled
    seconds = [worker.programs[program].compile for worker in workers.stats().workers]
    assert [set(each) for each in seconds] == [{"double", "square"}] * 2
    assert torch.allclose(ran(workers, program, width, op_by_op=True), expected(width))
    # What was compiled before is compiled from the first run on.
    workers.synchronize()
    text = sized(TEXT, width)
    again = workers.load(text, background=True)
    assert workers.are_compiled([again])
    assert torch.allclose(ran(workers, again, width, op_by_op=False), expected(width))
    for mark in marks(cache) - marked:
        mark.unlink()
    assert not workers.are_compiled([workers.load(text, background=True)])


def test_a_program_that_cannot_be_compiled_goes_on_op_by_op(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    with workers_with(cache, CXX=str(broken)) as accelerator:
        program = begun(accelerator)
        wait_until(lambda: accelerator.are_compiled([program]))
        with caplog.at_level(logging.INFO, "moaic"):
            assert torch.allclose(ran(accelerator, program, op_by_op=False), EXPECTED)
        assert not accelerator.are_compiled([program])
        (said,) = caplog.messages
        assert said.startswith("A program runs op by op, as its functions could not be compiled: ")
        assert "another worker" not in said
        assert torch.allclose(ran(accelerator, program, op_by_op=True), EXPECTED)
        assert not marks(cache)


def test_a_killed_compiler_is_replaced_by_the_worker(shared: Shared) -> None:
    workers, cache, width = shared.workers, shared.cache, 48
    workers.synchronize()
    known, marked = set(processes(cache)), marks(cache)
    program = begun(workers, width)
    wait_until(lambda: set(processes(cache)) - known)
    for pid in set(processes(cache)) - known:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: workers.are_compiled([program]))
    assert torch.allclose(ran(workers, program, width, op_by_op=False), expected(width))
    assert len(marks(cache) - marked) == 1


ONE_RANK = TEXT.replace("[dp=2]", "[dp=1]")


def test_workers_without_a_part_keep_nobody_waiting(shared: Shared) -> None:
    workers, widths = shared.workers, (56, 64)
    programs = [workers.load(sized(ONE_RANK, width), background=True) for width in widths]
    ran(workers, programs[0], widths[0], op_by_op=True)
    for program in programs:
        wait_until(lambda program=program: workers.are_compiled([program]), PATIENCE_SECONDS / 2)


def test_a_program_that_waited_for_the_compiler_is_marked_too(shared: Shared) -> None:
    workers, text = shared.workers, sized(TEXT, 16)
    workers.synchronize()
    marked = marks(shared.cache)
    assert torch.allclose(ran(workers, workers.load(text), op_by_op=False), EXPECTED)
    assert len(marks(shared.cache) - marked) == 1
    assert workers.are_compiled([workers.load(text, background=True)])


def test_programs_get_ready_in_their_order_and_those_that_belong_together_at_once(shared: Shared) -> None:
    workers, width, one_rank = shared.workers, 24, sized(ONE_RANK, 24)
    first, second = begun(workers, width), workers.load(one_rank, background=True)
    assert not workers.are_compiled([second])
    wait_until(lambda: workers.are_compiled([second]))
    assert workers.are_compiled([first])
    assert torch.allclose(ran(workers, second, width, op_by_op=False), expected(width))
    texts = [text.replace("tanh", "sin") for text in (sized(TEXT, width), one_rank)]
    others = [workers.load(text, background=True) for text in texts]
    assert not workers.are_compiled(others)
    wait_until(lambda: workers.are_compiled(others))
    for program in others:
        found = ran(workers, program, width, op_by_op=False)
        assert torch.allclose(found, (2 * x_of(width)).square().sin(), atol=1e-6)
    assert torch.allclose(ran(workers, first, width, op_by_op=False), expected(width))


def test_what_does_not_fit_op_by_op_waits(shared: Shared) -> None:
    program = begun(shared.workers, 32)
    assert shared.workers.are_compiled([program], at_once=True)
    assert torch.allclose(ran(shared.workers, program, 32, op_by_op=False), expected(32))


def test_compilers_end_with_their_workers(cache: Path) -> None:
    with workers_with(cache) as two:
        two.synchronize()
        known = set(processes(cache))
        program = begun(two)
        wait_until(lambda: set(processes(cache)) - known)
        assert not two.are_compiled([program])
        two.close()
        wait_until(lambda: not processes(cache), 2.0)
