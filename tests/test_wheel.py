from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent

SCRIPT = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
model.to("moai")
compiled = torch.compile(model, backend="moai")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x = torch.randn(32, 8)
losses = []
for _ in range(3):
    loss = (compiled(x.to("moai")) - x.sum(1, keepdim=True).to("moai")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[0] > losses[1] > losses[2], losses
"""


def run(*command: str | Path, cwd: Path) -> str:
    # What is found by a path of this checkout is not in the wheel.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(requirements: list[str]) -> list[metadata.Distribution]:
    """The installed distributions that `requirements` ask for, and those that they ask for in turn; no extras."""
    found: dict[str, metadata.Distribution] = {}
    waiting = list(requirements)
    while waiting:
        requirement = Requirement(waiting.pop())
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and normal(requirement.name) not in found:
            distribution = metadata.distribution(requirement.name)
            found[normal(requirement.name)] = distribution
            waiting += distribution.requires or []
    return list(found.values())


def link(distribution: metadata.Distribution, folder: Path) -> None:
    """Makes a distribution of this environment importable from `folder` as well, without copying it."""
    for name in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
        target = Path(str(distribution.locate_file(name)))
        if target.exists() and not (folder / name).exists():
            (folder / name).symlink_to(target)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment that holds the built wheel and its declared dependencies, and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=shutil.ignore_patterns(".*", "*.egg-info", "out"))
    # The environment is this one: nothing is to be made for it.
    run("make", "--assume-old=.venv/.ready", "wheel", f"BIN={Path(sys.executable).parent}", cwd=folder / "source")
    (wheel,) = (folder / "source" / "dist").glob("*.whl")
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    install = ("-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    run(sys.executable, *install, cwd=folder)
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    declared = "from importlib.metadata import requires; print('\\n'.join(requires('moaic')))"
    for distribution in closure(run(python, "-c", declared, cwd=folder).splitlines()):
        link(distribution, packages)
    return python


@pytest.mark.slow
def test_the_wheel_holds_the_house(bare: Path, tmp_path: Path) -> None:
    printed = run(
        bare, "-c", "import moaic.ir.parser as p, moaic.passes, moaic.runtime; print(p.__file__)", cwd=tmp_path
    )
    assert Path(printed.strip()).is_relative_to(bare.parent.parent)


@pytest.mark.slow
def test_the_wheel_trains_three_steps(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    run(bare, "train.py", cwd=tmp_path)


@pytest.mark.slow
def test_the_wheel_brings_the_command(bare: Path, tmp_path: Path) -> None:
    assert "verify" in run(bare.parent / "moaic", "--help", cwd=tmp_path)


@pytest.mark.slow
def test_the_wheel_has_every_extra_with_what_it_names(bare: Path, tmp_path: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    asked = "import json; from importlib.metadata import metadata; print(json.dumps(metadata('moaic').json))"
    written = json.loads(run(bare, "-c", asked, cwd=tmp_path))
    assert sorted(written["provides_extra"]) == sorted(extras)
    needed = [Requirement(text) for text in written["requires_dist"]]
    for extra, named in extras.items():
        brought = {
            (each.name, str(each.specifier), *sorted(each.extras))
            for each in needed
            if each.marker and each.marker.evaluate({"extra": extra}) and not each.marker.evaluate({"extra": ""})
        }
        wanted = {(each.name, str(each.specifier), *sorted(each.extras)) for each in map(Requirement, named)}
        assert brought == wanted, extra


def test_the_readme_names_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `\[(\w+)\]` \|", text, re.MULTILINE)) == set(extras)
