"""Measured kernels are kept in a file, by machine; without one, training goes on."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from moaic.runtime.controller.errors import WorkerError
from moaic.support import kernel_profile
from moaic.support.kernel_profile import BUDGET, WAIT, KernelProfile, measured_kernels


def test_what_was_measured_is_known_to_the_same_machine(tmp_path: Path) -> None:
    path = tmp_path / "kernels.sqlite"
    here, there = KernelProfile(path, "here"), KernelProfile(path, "there")
    here.keep({"a": 1.0, "b": 2.0})
    there.keep({"a": 3.0})
    assert KernelProfile(path, "here").known(["a", "b", "c"]) == {"a": 1.0, "b": 2.0}
    here.keep({"a": 4.0})
    assert here.known(["a"]) == {"a": 4.0}
    here.forget()
    assert here.known(["a", "b"]) == {}
    assert there.known(["a"]) == {"a": 3.0}


@pytest.mark.parametrize("kind", ["damaged", "folder", "nowhere", "off"])
def test_a_file_that_cannot_be_used_knows_nothing(tmp_path: Path, kind: str) -> None:
    path: Path | None = tmp_path / kind
    if kind == "damaged":
        (tmp_path / kind).write_bytes(b"no database" * 1000)
    elif kind == "folder":
        (tmp_path / kind).mkdir()
    else:
        path = tmp_path / kind / "kernels.sqlite" if kind == "nowhere" else None
    profile = KernelProfile(path, "here")
    profile.keep({"a": 1.0})
    profile.forget()
    assert profile.known(["a"]) == {}
    # A damaged one is removed, and made again.
    profile.keep({"a": 1.0})
    assert profile.known(["a"]) == ({"a": 1.0} if kind == "damaged" else {})


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The kernels that are timed, each with the seconds of its expectation; `broken` cannot run."""
    done: list[str] = []

    def seconds(accelerator: object, kernel: str, expected: float) -> float:
        done.append(kernel)
        if kernel == "broken":
            raise WorkerError("no memory")
        return expected

    monkeypatch.setattr(kernel_profile, "kernel_seconds", seconds)
    monkeypatch.setattr(kernel_profile, "is_busy", lambda: False)
    monkeypatch.setattr(
        kernel_profile.session,
        "accelerator",
        lambda: SimpleNamespace(pending=None, is_compiling=False, synchronize=lambda: None, has_gpus=False),
    )
    monkeypatch.setattr(kernel_profile, "this_profile", lambda: KernelProfile(tmp_path / "kernels.sqlite", "here"))
    return done


def test_those_that_take_most_are_measured_first_within_the_budget(timed: list[str]) -> None:
    expected = {"small": 0.01, "huge": BUDGET, "large": 0.1, "broken": 0.05}
    assert set(measured_kernels(expected) or {}) == {"large", "small"}
    assert timed == ["large", "broken", "small"]


def test_what_is_known_is_not_measured_again(timed: list[str]) -> None:
    measured_kernels({"a": 0.01})
    found = measured_kernels({"a": 7.0, "b": 0.02})
    assert found is not None
    assert {text: number.value for text, number in found.items()} == {"a": 0.01, "b": 0.02}
    assert timed == ["a", "b"]


def test_nothing_is_measured_while_a_forward_waits_for_its_backward(
    timed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_profile.session, "accelerator", lambda: SimpleNamespace(pending=object()))
    assert measured_kernels({"a": 0.01}) is None
    assert not timed


def test_what_is_known_serves_at_any_time(timed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    measured_kernels({"a": 0.01})
    busy = SimpleNamespace(pending=object(), is_compiling=True)
    monkeypatch.setattr(kernel_profile.session, "accelerator", lambda: busy)
    assert set(measured_kernels({"a": 0.01}) or {}) == {"a"}


def test_what_is_measured_on_a_busy_machine_is_not_kept(timed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_profile, "is_busy", lambda: True)
    for _ in range(2):
        assert set(measured_kernels({"a": 0.01}) or {}) == {"a"}
    assert timed == ["a", "a"]


def test_a_locked_file_is_waited_for_once(tmp_path: Path) -> None:
    path = tmp_path / "kernels.sqlite"
    profile = KernelProfile(path, "here")
    profile.keep({"a": 1.0})
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("begin exclusive")
        start = time.monotonic()
        assert profile.known(map(str, range(100))) == {}
        assert time.monotonic() - start < 10 * WAIT
        other.execute("rollback")
    assert profile.known(["a"]) == {"a": 1.0}


def test_a_file_of_another_form_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "kernels.sqlite"
    with closing(sqlite3.connect(path)) as other:
        other.execute("create table kernels (something text)")
    profile = KernelProfile(path, "here")
    assert profile.known(["a"]) == {}
    profile.keep({"a": 1.0})
    assert profile.known(["a"]) == {"a": 1.0}
