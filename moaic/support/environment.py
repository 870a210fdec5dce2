"""The environment variables of moaic, checked when a program begins, not when the first of them is needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from moaic.ir.errors import Diagnostic
from moaic.planner.request import parse_request
from moaic.runtime.host.env_flags import (
    AUTOTUNE_VARIABLE,
    COMPILE_VARIABLE,
    FULL,
    GRAPHS_VARIABLE,
    STEPS_VARIABLE,
    TRACEBACK_VARIABLE,
    says_count,
    says_when,
    says_yes,
)
from moaic.support.logging_setup import LOG_VARIABLE, level_of


def check(environment: Mapping[str, str]) -> None:
    """Raises Diagnostic for the first variable whose value is invalid."""
    for mistake in mistakes(environment):
        raise mistake


def mistakes(environment: Mapping[str, str]) -> Iterator[Diagnostic]:
    """One Diagnostic for each variable whose value is invalid."""
    for variable, read in _READERS.items():
        if environment.get(variable):
            try:
                read(environment[variable])
            except Diagnostic as error:
                named = variable in error.message
                yield error if named else Diagnostic(f"{variable}: {error.message}", hint=error.hint)


def _check_device(word: str) -> None:
    if word not in ("0", "1"):
        raise Diagnostic(f"invalid value `{word}`", hint="set 0 or 1, or leave it out")


def _check_trace(word: str) -> None:
    if word != FULL:
        raise Diagnostic(f"invalid value `{word}`", hint=f"set {FULL}, or leave it out")


def _check_folder(path: str) -> None:
    folder = Path(path)
    above = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not above.is_dir():
        raise Diagnostic(f"`{above}` is a file, not a folder")
    try:
        # Whether a folder can be made, only making it tells: the superuser may write to /proc, where none can be.
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        raise Diagnostic(f"there is no folder `{folder}`, and it cannot be made") from None
    if not os.access(folder, os.W_OK):
        raise Diagnostic(f"`{folder}` cannot be written to")


def _check_cache(path: str) -> None:
    if path != "off":
        _check_folder(path)


_READERS: Final[Mapping[str, Callable[[str], object]]] = {
    LOG_VARIABLE: level_of,
    "MOAI_CACHE": _check_cache,
    COMPILE_VARIABLE: lambda word: says_when("compiling", word),
    GRAPHS_VARIABLE: lambda word: says_yes("CUDA graphs", word),
    AUTOTUNE_VARIABLE: lambda word: says_count(AUTOTUNE_VARIABLE, word),
    STEPS_VARIABLE: lambda word: says_count(STEPS_VARIABLE, word),
    TRACEBACK_VARIABLE: _check_trace,
    "MOAI_DEVICE": _check_device,
    "MOAI_DUMP": _check_folder,
    "MOAI_PLAN": parse_request,
}
