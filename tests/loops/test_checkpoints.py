"""Checkpoints load bit for bit, on another number of workers too, and training continues as without a break."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from moaic import checkpoint
from moaic.ir.layout import Layout, Mesh, Split
from moaic.runtime.protocol.boxes import boxes, parts
from moaic.runtime.protocol.placement import Placement, everywhere, spread
from tests.exact.training import PLANS as OPTIONS
from tests.exact.training import Trainee, compiled
from tests.loops.compare import PLANS
from tests.loops.resume import FIRST, STEPS, State, digest, optimizer_of, resumed, state_of, train
from tests.loops.tiny import TINY

ROOT = Path(__file__).resolve().parents[2]

torch_checkpoint: Any = dcp


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run on two workers, saved as a file and as a folder; what the state was."""
    torch.compiler.reset()
    path = tmp_path_factory.mktemp("checkpoints")
    model = TINY.model().to("moai")
    optimizer = optimizer_of(model)
    train(model, optimizer, compiled(model, OPTIONS["use"], compile=False), range(FIRST))
    state = state_of(model, optimizer)
    torch.save(state, path / "file")
    checkpoint.save(state, path / "folder")
    return path, digest(state)


def resume(path: Path, workers: int, plan: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "MOAI_FLAVOR": str(workers), "MOAI_COMPILE": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.loops.resume", str(path), plan]
    return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_resume_on_another_number_of_workers(saved: tuple[Path, str]) -> None:
    path, expected = saved
    host = TINY.model()
    optimizer, _ = resumed(path / "file", host)
    wanted = train(host, optimizer, host, range(FIRST, FIRST + STEPS))
    for run in (resume(path / "folder", 3, "dp=3,distribute_param=use"), resume(path / "file", 1, "dp=1")):
        printed, _ = run.communicate()
        assert run.returncode == 0
        found, losses = printed.splitlines()
        assert found == expected
        assert [float(loss) for loss in losses.split()] == pytest.approx(wanted, rel=1e-5)


def test_a_folder_is_what_torch_writes(saved: tuple[Path, str]) -> None:
    """Plain torch reads it on the host; workers write it, and each of them its share."""
    path, _ = saved
    host = TINY.model()
    state = {"model": host.state_dict()}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        torch_checkpoint.load(state, checkpoint_id=path / "folder", no_dist=True)
    assert digest(state["model"]) == digest(torch.load(path / "file", map_location="cpu")["model"])
    sizes = [file.stat().st_size for file in (path / "folder").glob("*_worker?.distcp")]
    assert len(sizes) == 2
    assert min(sizes) > 0.8 * max(sizes)


def test_a_checkpoint_is_replaced_once_the_next_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def state(value: float) -> State:
        return {"ours": torch.full((3,), value, device="moai"), "host": torch.full((2,), value)}

    def fail(writer: checkpoint.Writer, metadata: object, results: object) -> None:
        raise OSError(28, "No space left on device")

    checkpoint.save(state(1.0), tmp_path)
    first = set(tmp_path.iterdir())
    checkpoint.save(state(2.0), tmp_path)
    second = set(tmp_path.iterdir())
    assert first & second == {tmp_path / ".metadata"}
    assert len(first) == len(second)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.Writer, "finish", fail)
        with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}'"):
            checkpoint.save(state(3.0), tmp_path)
    assert set(tmp_path.iterdir()) == second
    found = state(0.0)
    checkpoint.load(found, tmp_path)
    assert found["ours"].tolist() == [2, 2, 2]
    assert found["host"].tolist() == [2, 2]


@pytest.mark.parametrize("plan", PLANS)
def test_save_and_load_under_any_plan(plan: str, tmp_path: Path) -> None:
    torch.compiler.reset()
    trainee = Trainee(TINY)
    trainee.use(plan)
    model, optimizer = trainee.model, optimizer_of(trainee.model)
    train(model, optimizer, trainee.call, range(2))
    state = state_of(model, optimizer)
    before = digest(state)
    checkpoint.save(state, tmp_path)
    train(model, optimizer, trainee.call, range(1))
    assert digest(state_of(model, optimizer)) != before
    checkpoint.load(state, tmp_path)
    assert digest(state_of(model, optimizer)) == before


def test_what_workers_do_not_hold_is_saved_too(tmp_path: Path) -> None:
    """Tensors of the host, values not sent yet, views, numbers; and back into tensors that lie otherwise."""
    base = torch.arange(24.0).view(4, 6)

    def state(place: str) -> State:
        whole = base.clone().to(place)
        return {"host": base + 1, "late": torch.full((2, 2), 3.0, device=place), "view": whole.t()[1:], "number": 5}

    given = state("moai")
    checkpoint.save(given, tmp_path)
    wanted = state("cpu")
    empty: State = {name: torch.zeros_like(value) if name != "number" else 0 for name, value in wanted.items()}
    moved: State = {name: value.to("moai") if name != "number" else 0 for name, value in empty.items()}
    for found in (empty, moved):
        checkpoint.load(found, tmp_path)
        assert digest(found) == digest(wanted)


def test_boxes_of_digits() -> None:
    """A split with a small stride is made of several boxes; copies are one part."""
    mesh = Mesh((("dp", 2), ("tp", 2)))
    place = Placement(mesh, Layout((Split("dp", 0, 2), Split("tp", 1, 3))))
    assert [box.starts for box in boxes((8, 6), place, 3)] == [(2, 3), (6, 3)]
    assert [box.local for box in boxes((8, 6), place, 3)] == [(0, 0), (2, 0)]
    uneven = Placement(Mesh((("dp", 4), ("tp", 2))), Layout((Split("dp", 0, 2), Split("tp", 1, 4))))
    assert [boxes((5, 7), uneven, rank)[0].sizes for rank in (0, 1, 4, 5)] == [(2, 4), (2, 3), (1, 4), (1, 3)]
    assert not boxes((5, 7), uneven, 6)
    for shape, where in (((8, 6), place), ((8, 6), everywhere(4)), ((3, 8), spread((3, 8), 4)), ((5, 7), uneven)):
        count = torch.zeros(shape)
        for part in parts(shape, where):
            for _, starts, sizes in part.boxes:
                count[tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))] += 1
        assert bool((count == 1).all())
