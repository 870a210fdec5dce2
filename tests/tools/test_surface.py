"""The command lines are frozen: the output of `--help` of every command is in a file beside this one.

`python tests/tools/test_surface.py > tests/tools/surface.txt` takes a change in.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

from moaic import cli
from moaic.runtime.host.version import VERSION
from moaic.tools import smi, switch_model

KEPT = Path(__file__).with_name("surface.txt")

TOOLS: dict[str, Callable[[Sequence[str]], int]] = {
    "moaic": cli.main,
    "moai-smi": smi.main,
    "moai-switch-model": switch_model.main,
}


def helped(tool: str, *command: str) -> str:
    """What the command's `--help` prints."""
    printed = io.StringIO()
    wide = mock.patch.dict(os.environ, {"COLUMNS": "100"})
    with wide, contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        TOOLS[tool]([*command, "--help"])
    return printed.getvalue()


def surface() -> str:
    """That of every command, one after the other."""
    return "\n".join(page for tool in TOOLS for page in pages(tool))


def pages(tool: str, *command: str) -> Iterator[str]:
    """The page of a command, then those of the commands below it."""
    text = helped(tool, *command)
    yield f"$ {' '.join([tool, *command])} --help\n{text}"
    for name in re.findall(r"^    (\w+) ", text.partition("COMMAND\n")[2], re.MULTILINE):
        yield from pages(tool, *command, name)


def test_the_command_lines_are_as_they_were() -> None:
    assert surface() == KEPT.read_text(encoding="utf-8"), (__doc__ or "").splitlines()[2]


def test_the_version_is_the_projects() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["version"] == VERSION


if __name__ == "__main__":
    sys.stdout.write(surface())
