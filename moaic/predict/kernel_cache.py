"""A cache of kernel costs for the planner: bytes and operations of the kernels that functions become on a GPU."""

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
from moaic.runtime.host.gpu_specs import Target
from moaic.text.files import write_whole

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
    "codegen/recurrent_layers.py",
    "protocol/aten_schema.py",
    "dtypes.py",
    "rng.py",
    "kernels",
)
"""Files and folders of `runtime/` that decide which kernels a function becomes, beside PyTorch and Triton."""

Kernels = Mapping[str, tuple[MadeKernel, ...]]
"""Kernels by the key of their function."""


class MadeKernels:
    """The known kernels of one target, valid for the current versions of PyTorch, Triton and moaic."""

    def __init__(self, target: Target, cache: Path | None) -> None:
        """Reads the kernels below `cache`, the user's cache folder; None keeps them in this process alone."""
        self.target = target
        self._folder = None if cache is None else cache / f"kernels-{target.name}-{fingerprint(target)}"
        self._known: dict[str, tuple[MadeKernel, ...]] = {} if self._folder is None else _read(self._folder)

    @property
    def known(self) -> Kernels:
        return dict(self._known)

    def make(self, program: Module) -> bool:
        """Compiles the kernels of functions of a program that are not known yet; returns whether there were any."""
        functions = {key_of(function): function for function, _ in called_in(program)}
        missing = functions.keys() - self._known.keys()
        for key in sorted(missing):
            kernels = generated(functions[key], self.target)
            self._keep(key, [MadeKernel(each.calls, each.nbytes, each.flops, each.heavy) for each in kernels])
        return bool(missing)

    def remember(self, rows: Iterable[Row]) -> None:
        """Adds the kernels of a whole program, given as rows of its report."""
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
    """A hash of everything but the function that decides which kernels it becomes."""
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
    """The kernels in the files of a folder; a damaged file is ignored."""
    found: dict[str, tuple[MadeKernel, ...]] = {}
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found[path.stem] = tuple(MadeKernel(*kernel) for kernel in json.loads(path.read_text(encoding="utf-8")))
    return found
