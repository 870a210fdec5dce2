"""What the kernels of functions were found to do when they were made for a GPU, remembered for the planner."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import astuple
from importlib import metadata
from pathlib import Path

from moaic.ir.graph import Module
from moaic.passes.perf.machine import MadeKernel
from moaic.passes.perf.structural_hash import key_of
from moaic.predict.kernel_report import Row, called_in
from moaic.runtime.codegen.cross_compile import generated
from moaic.runtime.host.folders import write_whole
from moaic.runtime.host.gpu_specs import Target

MAKERS = (
    "codegen/attention_math.py",
    "codegen/cross_compile.py",
    "codegen/gpu_attention.py",
    "codegen/grouped_mm.py",
    "codegen/lower_attention.py",
    "codegen/lower_experts.py",
    "codegen/lower_float8.py",
    "codegen/lower_random.py",
    "codegen/lower_to_fx.py",
    "protocol/aten_schema.py",
    "dtypes.py",
    "rng.py",
    "kernels",
)
"""Files and folders of `runtime/` that decide which kernels a function becomes, beside PyTorch and Triton."""

Kernels = Mapping[str, tuple[MadeKernel, ...]]
"""Of functions by their keys."""


class MadeKernels:
    """Of one target: those that were made before, by the same versions of everything, and those that are made now."""

    def __init__(self, target: Target, cache: Path | None) -> None:
        """`cache` is the person's folder for us; nothing is kept where there is none."""
        self.target = target
        self._folder = None if cache is None else cache / f"kernels-{target.name}-{fingerprint(target)}"
        self._known: dict[str, tuple[MadeKernel, ...]] = {} if self._folder is None else _read(self._folder)

    @property
    def known(self) -> Kernels:
        return dict(self._known)

    def make(self, program: Module) -> bool:
        """Makes the kernels of those functions of a program of which they are not known; whether there was one."""
        functions = {key_of(function): function for function, _ in called_in(program)}
        missing = functions.keys() - self._known.keys()
        for key in sorted(missing):
            kernels = generated(functions[key], self.target)
            self._keep(key, [MadeKernel(each.calls, each.nbytes, each.flops, each.heavy) for each in kernels])
        return bool(missing)

    def remember(self, rows: Iterable[Row]) -> None:
        """The rows of a whole program."""
        functions: dict[tuple[str, str], list[MadeKernel]] = {}
        for row in rows:
            kernel = MadeKernel(row.calls, row.nbytes, row.flops, row.heavy)
            functions.setdefault((row.function, row.key), []).append(kernel)
        for (_, key), kernels in functions.items():
            self._keep(key, kernels)

    def _keep(self, key: str, kernels: Iterable[MadeKernel]) -> None:
        self._known[key] = tuple(kernels)
        if self._folder is not None:
            # A folder that cannot be written to is no reason to fail.
            with contextlib.suppress(OSError):
                text = json.dumps([astuple(kernel) for kernel in self._known[key]])
                write_whole(self._folder / f"{key}.json", text + "\n")


def fingerprint(target: Target) -> str:
    """Of all that decides which kernels a function becomes, but the function."""
    runtime = Path(__file__).parents[1] / "runtime"
    makers = [path for name in MAKERS for path in (sorted((runtime / name).rglob("*.py")) or [runtime / name])]
    sources = [hashlib.sha256(path.read_bytes()).hexdigest() for path in makers]
    facts = [_version("torch"), _version("triton"), repr(target), *sources]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _read(folder: Path) -> dict[str, tuple[MadeKernel, ...]]:
    """What the files say; one that somebody has been at says nothing."""
    found: dict[str, tuple[MadeKernel, ...]] = {}
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found[path.stem] = tuple(MadeKernel(*kernel) for kernel in json.loads(path.read_text(encoding="utf-8")))
    return found
