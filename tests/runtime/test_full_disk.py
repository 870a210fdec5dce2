"""A disk without space: one sentence that says where and what to do, and nothing of the program is lost."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from moaic.runtime.host.disk import CannotWrite, disk_errors_named
from tests.runtime.conftest import Script


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A folder with 64 KiB."""
    folder = tmp_path / "full"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("needs a file system of its own")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


PROGRAM = """
import torch
from moaic import checkpoint

def attempt(what, act):
    try:
        act()
    except Exception as error:
        print(what, type(error).__name__, *str(error).splitlines(), flush=True)

model = torch.nn.Linear(300, 300).to("moai")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(run):
    run(torch.ones(4, 300, device="moai")).sum().backward()
    optimizer.step()
step(model)
before = model.weight.tolist()
attempt("workers", lambda: checkpoint.save({"w": model.weight}, "FULL/one"))
attempt("own", lambda: checkpoint.save({"w": torch.ones(300, 300)}, "FULL/two"))
attempt("missing", lambda: checkpoint.load({"w": model.weight}, "FULL/nowhere"))
attempt("compiled", lambda: step(torch.compile(model, backend="moai", options={"dp": 2})) or model.weight.sum().item())
print("kept", model.weight.tolist() == before)
"""


def test_a_full_disk(script: Script, full: Path) -> None:
    words = script.start(
        PROGRAM.replace("FULL", str(full)),
        MOAI_LOG="error",
        MOAI_COMPILE="wait",
        TORCHINDUCTOR_CACHE_DIR=str(full / "cache"),
    )
    # PyTorch for CUDA warns in between that there is none.
    lines = {line.partition(" ")[0]: line for line in [" ".join(words), *script.finish().splitlines()]}
    first, own, missing, compiled, kept = (lines[each] for each in ("workers", "own", "missing", "compiled", "kept"))
    name = "CannotWrite: No space left on device, "
    assert first.startswith("workers WorkerError worker 0 of 2 failed in ")
    assert re.search(rf": {name}writing {full}/one/__\w+_worker0\.distcp$", first)
    assert own == f"own OSError [Errno 28] No space left on device: '{full}/two'"
    assert missing == f"missing FileNotFoundError [Errno 2] No checkpoint: '{full}/nowhere'"
    assert not [path for folder in ("one", "two") for path in (full / folder).iterdir()]
    assert compiled.startswith("compiled WorkerError worker ")
    where = f"{name}where compiled functions are kept ({full}/cache) or compilers work "
    assert where in compiled
    assert compiled.endswith(" to other folders, or MOAI_COMPILE=0")
    assert kept == "kept True"


def fail_as_torch_save() -> None:
    try:
        Path("/dev/full").write_bytes(b"x")
    except OSError:
        raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904 - what hides the reason


def test_what_hides_the_reason_is_looked_through() -> None:
    with pytest.raises(CannotWrite, match=r"^No space left on device, here$"), disk_errors_named(lambda: "here"):
        fail_as_torch_save()
    with pytest.raises(ZeroDivisionError), disk_errors_named(lambda: "here"):
        raise ZeroDivisionError
