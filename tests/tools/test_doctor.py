"""Findings about an installation: missing parts come with a fix, and with exit code 1."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from moaic.runtime.host.cores import cores
from moaic.tools.doctor import FindingState, findings

if TYPE_CHECKING:
    from tests.tools.conftest import Person


def doctor(person: Person, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moaic", "doctor"]
    environment = {**person.environment, "MOAI_COMPILE": "1", **more}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_working_installation(person: Person) -> None:
    done = doctor(person, MOAI_FLAVOR="2", MOAI_CACHE=str(person.home / "cache"))
    assert done.returncode == 0, done.stdout
    assert not done.stderr
    assert "missing" not in done.stdout
    assert f"found    {cores()} core" in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith("A first run would start 2 workers of ")
    assert "measure this machine for a few seconds" in last


def test_what_is_missing_comes_with_its_cure(person: Person) -> None:
    person.flavors_file.write_text("workers = = 1", encoding="utf-8")
    done = doctor(person, CXX="no-such-compiler", MOAI_DEVICE="0")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    for missing, cure in (
        ("missing  there is no C++ compiler `no-such-compiler`", "apt-get install g++"),
        ("missing  MOAI_DEVICE=0 keeps the device away", "unset MOAI_DEVICE"),
        (f"missing  {person.flavors_file}:1: Invalid value", "a flavor reads [[flavor]]"),
    ):
        (at,) = [index for index, line in enumerate(lines) if line.startswith(missing)]
        assert cure in lines[at + 1]
    assert lines[-1].startswith("A first run would not work")


def test_what_is_not_needed_stops_nobody(person: Person) -> None:
    found = findings({**person.environment, "CXX": "no-such-compiler", "MOAI_COMPILE": "0", "MOAI_CACHE": "off"})
    assert not [finding for finding in found if finding.state is FindingState.MISSING]
    assert "MOAI_COMPILE is off: no compiler is needed, and steps are slower" in [finding.text for finding in found]
