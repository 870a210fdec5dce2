"""Files that a contributor's tools read: hooks, the workflow, issue forms, settings of editors."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
FORMS = {"bug.yml", "wrong-result.yml"}
LINKED = sorted(path.name for path in (ROOT / "moaic").iterdir() if path.is_symlink())


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def recipe(target: str) -> list[str]:
    """The commands of a make target, as they are run in a checkout."""
    match = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert match is not None
    return [line.strip().replace("$(BIN)", ".venv/bin") for line in match[1].splitlines()]


def test_hooks_run_the_commands_of_make_check() -> None:
    """From .venv, so that no version is named twice."""
    repositories = read(".pre-commit-config.yaml")["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"]
    hooks = repositories[0]["hooks"]
    assert [hook["entry"] for hook in hooks] == recipe("check")
    assert all(hook["language"] == "system" and not hook["pass_filenames"] for hook in hooks)


def test_the_workflow_tries_three_versions_of_pytorch() -> None:
    workflow = read(".github/workflows/ci.yml")
    commands = {each["pytorch"]: each["command"] for each in workflow["jobs"]["test"]["strategy"]["matrix"]["include"]}
    assert commands == {"pinned": ".ci/run", "oldest": "make oldest", "newest": "make newest"}
    assert recipe("oldest newest")[-1].startswith("$(MAKE) test ")
    assert workflow["jobs"]["test"]["steps"][-1] == {"run": "${{ matrix.command }}"}


def test_the_workflow_has_no_more_rights_than_it_needs() -> None:
    workflow = read(".github/workflows/ci.yml")
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 120
        assert "permissions" not in job
        for step in job["steps"]:
            assert "uses" not in step or re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"]), step


def test_the_workflow_takes_the_oldest_python() -> None:
    """What pyproject.toml admits, and what types are checked for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    steps = read(".github/workflows/ci.yml")["jobs"]["test"]["steps"]
    (python,) = [step["with"]["python-version"] for step in steps if "setup-python" in step.get("uses", "")]
    assert project["project"]["requires-python"] == f">={python}"
    assert project["tool"]["pyright"]["pythonVersion"] == python


@pytest.mark.parametrize("name", sorted(FORMS))
def test_forms_ask_for_what_is_needed_to_see_it(name: str) -> None:
    form = read(f".github/ISSUE_TEMPLATE/{name}")
    fields = {field["id"]: field for field in form["body"] if field["type"] != "markdown"}
    assert {"script", "doctor", "dump"} <= fields.keys()
    assert "`moaic doctor`" in fields["doctor"]["attributes"]["description"]
    assert "`MOAI_DUMP=" in fields["dump"]["attributes"]["description"]
    assert all(fields[needed]["validations"]["required"] for needed in ("script", "doctor"))


def test_there_are_no_other_forms() -> None:
    assert {path.name for path in (ROOT / ".github/ISSUE_TEMPLATE").iterdir()} == FORMS | {"config.yml"}


def test_editors_show_each_file_by_the_path_that_it_is_imported_by() -> None:
    """A file of a linked folder has two paths, and by the other one each of its classes is a second one."""
    settings = json.loads((ROOT / ".vscode/settings.json").read_text(encoding="utf-8"))
    pyright = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pyright"]
    assert sorted(settings["files.exclude"]) == sorted(pyright["ignore"]) == LINKED
    assert {f"moaic/{name}" for name in LINKED} <= set(pyright["include"])
