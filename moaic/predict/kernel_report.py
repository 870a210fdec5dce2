"""The kernels that a plan's functions become on a GPU, present or not: a table, sources and binaries."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Function, Module
from moaic.ir.localize import localize
from moaic.passes.lowering.programs import lower
from moaic.passes.perf.structural_hash import key_of
from moaic.runtime.codegen.cross_compile import Generated, generated
from moaic.runtime.codegen.triton_aot import Binary, compiled
from moaic.runtime.host.gpu_specs import LAUNCH_SECONDS, Target
from moaic.text.tables import aligned_head, aligned_row, fitted, left, right
from moaic.text.units import amount, duration


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel of one function: bytes, operations and seconds of one call."""

    function: str
    key: str
    """Structural hash of the function as one rank runs it."""
    runs: int
    """Runs of the function in one step."""
    kernel: str
    calls: int
    """Calls of the kernel in one run of the function."""
    ops: tuple[str, ...]
    registers: int | None
    """None for a kernel of the vendor's library, as are `shared` and `spills`."""
    shared: int | None
    spills: int | None
    nbytes: float
    flops: float
    heavy: str | None
    """Element type of the matrix product, if the kernel is one."""
    seconds: float
    """Roofline time: the longer of arithmetic at the GPU's peak and traffic at its bandwidth."""


@dataclass(frozen=True, slots=True)
class CompiledFunction:
    """A kernel, with source and binary if Triton compiled it."""

    row: Row
    source: str | None
    binary: Binary | None


def program_of(module: Module) -> Module:
    """The program of a plan, which computes only in the functions that it calls; `module` itself if it is one.

    Raises Diagnostic for a module without functions.
    """
    if not module.functions:
        raise Diagnostic("there is no function to make kernels of")
    called = {op.callee for op in module.main.ops if op.name == "call"}
    is_program = called and all(op.name == "call" or op.name.startswith("moai.") for op in module.main.ops)
    return module if is_program else lower(module).joint


def made_of(module: Module, target: Target) -> Iterator[CompiledFunction]:
    """Compiles a program for `target` and yields its kernels, function by function. Raises Diagnostic."""
    for function, runs in called_in(module):
        yield from _of_function(function, runs, target)


def called_in(program: Module) -> Iterator[tuple[Function, int]]:
    """The functions that a program calls, localized to a rank, with the number of calls."""
    runs = Counter(op.callee for op in program.main.ops if op.name == "call")
    return ((localize(each, program.mesh), runs[each.name]) for each in program.functions if runs[each.name])


def _of_function(function: Function, runs: int, target: Target) -> Iterator[CompiledFunction]:
    for kernel in generated(function, target):
        binary = None if kernel.source is None else compiled(kernel.name, kernel.source, target)
        yield CompiledFunction(_row(function, runs, kernel, binary, target), kernel.source, binary)


def _row(function: Function, runs: int, kernel: Generated, binary: Binary | None, target: Target) -> Row:
    return Row(
        function.name,
        key_of(function),
        runs,
        kernel.name,
        kernel.calls,
        kernel.ops,
        None if binary is None else binary.registers,
        None if binary is None else binary.shared,
        None if binary is None else binary.spills,
        kernel.nbytes,
        kernel.flops,
        kernel.heavy,
        target.seconds(kernel.flops, kernel.nbytes, kernel.heavy),
    )


COLUMNS = (
    *left("kernel"),
    *right("calls", "registers", "shared", "spills", "moved", "FLOPs", "time"),
    *left("ops"),
)

INDENT = "  "
"""Blanks before the kernels of a function."""


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Lines of a table per function, then the summary."""
    cells = [_cells(row) for row in rows]
    columns = fitted(COLUMNS, cells)
    function = None
    for row, words in zip(rows, cells, strict=True):
        if row.function != function:
            function = row.function
            yield f"@{function}, run {row.runs} times a step" if row.runs > 1 else f"@{function}, run once a step"
            yield INDENT + aligned_head(columns)
        yield INDENT + aligned_row(columns, words)
    yield ""
    yield summary(rows)


def summary(rows: Sequence[Row]) -> str:
    """Numbers of kernels and spills, and the seconds of a step if each kernel ran at the roofline."""
    kernels = sum(row.runs * row.calls for row in rows)
    busy = sum(row.runs * row.calls * row.seconds for row in rows)
    spilling = sum(bool(row.spills) for row in rows)
    return (
        f"{len(rows)} kernels, {sum(row.registers is not None for row in rows)} of them Triton's, {spilling} with "
        f"spills; {kernels} launches a step: {duration(busy)} at the roofline, "
        f"{duration(busy + kernels * LAUNCH_SECONDS)} with {duration(LAUNCH_SECONDS)} for each launch"
    )


def save(folder: Path, made: Sequence[CompiledFunction], target: Target) -> None:
    """Writes source and binary of each Triton kernel to a folder per function, and the table to `kernels.json`."""
    for each in made:
        if each.source is not None and each.binary is not None:
            place = folder / each.row.function
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{each.row.kernel}.py").write_text(each.source, encoding="utf-8")
            (place / f"{each.row.kernel}.{target.suffix}").write_bytes(each.binary.code)
    folder.mkdir(parents=True, exist_ok=True)
    table = {"target": target.name, "device": target.device, "kernels": [asdict(each.row) for each in made]}
    (folder / "kernels.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def _cells(row: Row) -> tuple[str, ...]:
    counts = ("-" if number is None else str(number) for number in (row.registers, row.shared, row.spills))
    amounts = (f"{amount(row.nbytes)}B", amount(row.flops).rstrip(), duration(row.seconds))
    return (row.kernel, str(row.calls), *counts, *amounts, " ".join(row.ops))
