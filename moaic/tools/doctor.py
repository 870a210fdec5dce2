"""`moaic doctor`: reports what is installed and missing, how to fix it, and what a first run would do."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from moaic.ir.errors import Diagnostic
from moaic.runtime.host.cluster_settings import EXAMPLE, ClusterSettings, cluster_settings
from moaic.runtime.host.cores import cores, share_out
from moaic.runtime.host.cpp_compiler import (
    MEND_COMPILER,
    MEND_HEADER,
    compiler_name,
    compiler_path,
    python_header,
)
from moaic.runtime.host.env_flags import may_compile
from moaic.runtime.host.flavors import Flavor, flavors, startable
from moaic.runtime.host.folders import cluster_file, config_folder, runtime_folder, state_folder
from moaic.runtime.host.gpu_specs import target_of
from moaic.runtime.host.gpus import built_for, usable, variable
from moaic.runtime.host.memory import data_limit, free_bytes, host_bytes
from moaic.runtime.host.selection import current, current_flavor
from moaic.runtime.host.version import VERSION
from moaic.runtime.host.worker_kinds import WORKERS_VARIABLE, asked_device, emulated_target
from moaic.support.cache_folder import cache_folder
from moaic.support.environment import mistakes
from moaic.text.units import count, gib

TRIED = "sm_90"
"""The architecture of the GPUs on which moaic has run, one at a time."""

OLDEST_PYTHON = (3, 11)

ENTRY_POINTS = {"torch.backends": "moaic", "torch_dynamo_backends": "moai"}
"""Entry points by which PyTorch finds moaic: name by group."""


class FindingState(StrEnum):
    FOUND = "found"
    NOTE = "note"
    """Not needed, or good to know."""
    MISSING = "missing"
    """Without it a first run would not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    state: FindingState
    text: str
    mend: str = ""
    """A command or another way to fix it."""

    def __str__(self) -> str:
        line = f"{self.state:<9}{self.text}"
        return f"{line}\n         fix: {self.mend}" if self.mend else line


def findings(environment: Mapping[str, str]) -> list[Finding]:
    """All findings, in the order in which a first run needs them."""
    checks: tuple[Callable[[Mapping[str, str]], Iterator[Finding]], ...] = (
        *(_python, _packages, _entry_points, _compiler, _hardware, _graphics),
        *(_variables, _folders, _flavor),
    )
    return [finding for check in checks for finding in check(environment)]


def report(environment: Mapping[str, str]) -> tuple[str, bool]:
    """The text that `moaic doctor` prints, and whether a first run would work."""
    found = findings(environment)
    works = all(finding.state is not FindingState.MISSING for finding in found)
    last = first_run(environment) if works else "A first run would not work: see what is missing above."
    return "\n".join([*map(str, found), "", last]), works


def first_run(environment: Mapping[str, str]) -> str:
    """A sentence on what a program that uses the accelerator now would start, measure and compile."""
    flavor = current_flavor(environment)
    threads = share_out(cores(), flavor.here)
    others = "".join(f", {count(share.workers, 'worker')} on {share.name}" for share in flavor.hosts)
    start = (
        f"A first run would start {count(flavor.here, 'worker')} of {count(max(threads), 'thread')} each{others} "
        f"({flavor.name}: {gib(flavor.per_worker)} per worker) as accelerator {current(environment)}"
    )
    folder = cache_folder(environment)
    known = list(folder.glob("machine-*.json")) if folder is not None else []
    measure = "" if known else ", measure this machine for a few seconds"
    compiling = "" if may_compile(environment) else " op by op, uncompiled"
    return f"{start}{measure}, and plan and run each model{compiling}."


def _python(environment: Mapping[str, str]) -> Iterator[Finding]:
    text = f"Python {platform.python_version()} at {sys.executable}"
    if sys.version_info >= OLDEST_PYTHON:
        yield Finding(FindingState.FOUND, text)
    else:
        yield Finding(FindingState.MISSING, f"{text} is too old", "make PYTHON=python3.11")


def _packages(environment: Mapping[str, str]) -> Iterator[Finding]:
    """The dependencies in the metadata of the installation."""
    try:
        wanted = metadata.requires("moaic") or []
    except metadata.PackageNotFoundError:
        yield Finding(FindingState.MISSING, "moaic is not installed", "pip install -c constraints.txt -e .")
        return
    yield Finding(FindingState.FOUND, f"moaic {VERSION}")
    for requirement in wanted:
        yield from _package(requirement)


def _package(requirement: str) -> Iterator[Finding]:
    """One requirement. Of the extras only rich is reported, which `moai-smi --watch` uses."""
    head, _, marker = requirement.partition(";")
    name, oldest = (re.split(r"[<>=\[\s]", head.strip())[0], re.findall(r">=\s*([\d.]+)", head))
    if "extra" in marker and name != "rich":
        return
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        if "extra" in marker:
            yield Finding(
                FindingState.NOTE,
                f"{name} is not installed, which `moai-smi --watch` needs",
                f"pip install '{head.strip()}'",
            )
        else:
            yield Finding(FindingState.MISSING, f"{name} is not installed", f"pip install '{head.strip()}'")
        return
    if oldest and _numbers(version) < _numbers(oldest[0]):
        yield Finding(FindingState.MISSING, f"{name} {version} is too old", f"pip install '{head.strip()}'")
    else:
        yield Finding(FindingState.FOUND, f"{name} {version}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(word) for word in re.findall(r"\d+", version)[:3])


def _entry_points(environment: Mapping[str, str]) -> Iterator[Finding]:
    for group, name in ENTRY_POINTS.items():
        if name not in metadata.entry_points(group=group).names:
            mend = "pip install -c constraints.txt -e ."
            yield Finding(FindingState.MISSING, f"PyTorch does not find `{name}` among its {group}", mend)
    if environment.get("MOAI_DEVICE") == "0":
        yield Finding(FindingState.MISSING, "MOAI_DEVICE=0 keeps the device away", "unset MOAI_DEVICE")


def _compiler(environment: Mapping[str, str]) -> Iterator[Finding]:
    """The compiler and headers with which Inductor compiles kernels."""
    if not may_compile(environment):
        yield Finding(FindingState.NOTE, "MOAI_COMPILE is off: no compiler is needed, and steps are slower")
        return
    path = compiler_path(environment)
    if path is None:
        text = f"there is no C++ compiler `{compiler_name(environment)}`"
        yield Finding(FindingState.MISSING, text, MEND_COMPILER)
    else:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
        yield Finding(FindingState.FOUND, f"C++ compiler {path}: {said.partition(chr(10))[0]}")
    header = python_header()
    if not header.exists():
        yield Finding(FindingState.MISSING, f"{header} is not there, which kernels include", MEND_HEADER)


def _variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    for mistake in mistakes(environment):
        yield Finding(FindingState.MISSING, mistake.message, mistake.hint)


def _hardware(environment: Mapping[str, str]) -> Iterator[Finding]:
    yield Finding(FindingState.FOUND, count(cores(), "core"))
    yield Finding(FindingState.FOUND, f"{gib(host_bytes())} of memory, {gib(free_bytes())} free")
    if (limit := data_limit()) is not None:
        yield Finding(FindingState.NOTE, f"ulimit -d allows each process {gib(limit)} of private memory")


def _graphics(environment: Mapping[str, str]) -> Iterator[Finding]:
    """The GPUs that workers use; if there are none, the GPUs of this host and the reason why they are not used."""
    used = usable(environment)
    with suppress(Diagnostic):
        if (device := asked_device(environment)) is not None:
            target = emulated_target(device)
            name = "compute on cores" if target is None else f"interpret the kernels of an {target_of(target).device}"
            yield Finding(FindingState.NOTE, f"{WORKERS_VARIABLE} has workers {name}")
            return
    for gpu in used:
        text = f"{gpu.name} with {gib(gpu.memory, 0)}: a worker computes on it"
        if gpu.arch == TRIED and len(used) == 1:
            yield Finding(FindingState.FOUND, text)
        else:
            yield Finding(FindingState.NOTE, f"{text}, which this version has not been tried with")
    if used:
        return
    built = built_for()
    nvidia = Path("/proc/driver/nvidia/gpus").glob("*/information")
    names = [line.split(":", 1)[1].strip() for path in nvidia for line in _lines(path) if line.startswith("Model:")]
    vendors = Path("/sys/class/drm").glob("card[0-9]/device/vendor")
    names += ["AMD GPU" for path in vendors if "0x1002" in _lines(path)]
    for name in names:
        if built:
            hidden = variable(built, environment)
            yield Finding(
                FindingState.NOTE, f"{name}: not used; PyTorch is for {built}, and its driver or {hidden} hides it"
            )
        else:
            yield Finding(FindingState.NOTE, f"{name}: not used; this PyTorch is for CPUs", "install a PyTorch for it")
    if not names:
        yield Finding(FindingState.FOUND, "no GPU, and none is needed")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _folders(environment: Mapping[str, str]) -> Iterator[Finding]:
    """The folders of running programs, of the cache and of the chosen flavor."""
    try:
        yield Finding(FindingState.FOUND, f"running programs are listed in {runtime_folder(environment)}")
    except Diagnostic as error:
        yield Finding(FindingState.NOTE, f"moai-smi will not see programs: {error.message}", error.hint)
    cache = cache_folder(environment)
    if cache is None:
        yield Finding(FindingState.NOTE, "nothing is cached: every run measures and plans anew")
    for folder, use in ((cache, "plans and measurements"), (state_folder(environment), "the chosen flavor")):
        if folder is None:
            continue
        if _writable(folder):
            yield Finding(
                FindingState.FOUND, f"{use} are kept in {folder}" if folder == cache else f"{use} is in {folder}"
            )
        else:
            yield Finding(
                FindingState.NOTE, f"{folder} cannot be written to: {use} will be forgotten", f"chmod u+w {folder}"
            )


def _writable(folder: Path) -> bool:
    """Whether the folder, or the nearest existing one above it, is writable."""
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    return os.access(nearest, os.W_OK | os.X_OK)


def _flavor(environment: Mapping[str, str]) -> Iterator[Finding]:
    try:
        known = flavors(environment)
        names = ", ".join(flavor.name for flavor in known if not flavor.hosts)
        yield Finding(FindingState.FOUND, f"flavors {names}; {current_flavor(environment).name} is chosen")
        yield from _cluster(known, environment)
    except Diagnostic as error:
        where = "" if error.span is None else f"{error.span.file}:{error.span.line}: "
        yield Finding(
            FindingState.MISSING, f"{where}{error.message}", error.hint or f"see {config_folder(environment)}"
        )


def _cluster(known: Sequence[Flavor], environment: Mapping[str, str]) -> Iterator[Finding]:
    """Whether workers of other hosts can be started, and what for. Raises Diagnostic for an invalid file."""
    path = cluster_file(environment)
    settings = cluster_settings(path)
    if settings is not None and find_spec("cryptography") is None:
        text = f"cryptography is not installed, which [cluster] in {path} needs"
        yield Finding(FindingState.MISSING, text, "pip install 'moaic[cluster]'")
    if away := [flavor for flavor in known if flavor.hosts]:
        yield _others(away, settings, path, environment)


def _others(
    away: Sequence[Flavor], settings: ClusterSettings | None, path: Path, environment: Mapping[str, str]
) -> Finding:
    """What becomes of flavors with workers on other hosts."""
    names = ", ".join(flavor.name for flavor in away)
    if settings is None:
        text = f"flavors {names} need other hosts, and {path} does not say how workers are started there"
        return Finding(FindingState.NOTE, text, f"add [cluster] to it, {EXAMPLE}")
    largest = max(away, key=lambda flavor: flavor.workers)
    try:
        startable(largest, [], environment)
    except Diagnostic as error:
        return Finding(FindingState.NOTE, error.message)
    return Finding(FindingState.FOUND, f"flavors {names} with {largest.others}, by launcher {settings.launcher}")
