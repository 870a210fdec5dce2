"""Modules and results as the lines that commands print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING

from moaic.ir.graph import Function, Module
from moaic.ir.ops import OPS, flops_of
from moaic.ir.printer import render_type
from moaic.passes.loop_axes import CHUNKS, MICRO_BATCHES
from moaic.passes.schedules import schedule_in
from moaic.text.tables import aligned_table, left, right
from moaic.text.units import amount, count

if TYPE_CHECKING:
    from torch import Tensor


def as_comment(lines: Iterable[str]) -> str:
    """The lines as a comment of the IR, so that the output can be parsed again, and a blank line."""
    return "\n".join(f"// {line}".rstrip() for line in lines) + "\n\n"


def sizes(module: Module) -> str:
    """`2 functions, 7 ops`."""
    ops = sum(len(function.ops) for function in module.functions)
    return f"{count(len(module.functions), 'function')}, {count(ops, 'op')}"


def summary(module: Module) -> list[str]:
    """One line for the module, then a table with a row for each function."""
    runs = module.runs()
    flops = {function.name: sum(map(flops_of, function.ops)) for function in module.functions}
    total = sum(runs[name] * flops[name] for name in flops)
    mesh = f", mesh {module.mesh} of {count(_ranks(module), 'rank')}" if module.mesh.axes else ""
    rows = [
        (
            f"@{function.name}",
            str(runs[function.name]),
            str(len(function.ops)),
            f"{amount(flops[function.name])}FLOP",
            *(f"{amount(nbytes)}B" for nbytes in _boundary_bytes(function, module)),
        )
        for function in module.functions
    ]
    columns = (*left("function"), *right("runs", "ops", "work", "reads", "returns"))
    return [f"{sizes(module)}{mesh}, {amount(total)}FLOP a run", "", *aligned_table(columns, rows)]


def _ranks(module: Module) -> int:
    """Those that run a module: parts of a loop run on the same ones, and so do several stages of a pipeline."""
    ranks = prod(size for axis, size in module.mesh.axes if axis not in (MICRO_BATCHES, CHUNKS))
    schedule = schedule_in(module)
    return ranks if schedule is None else ranks // schedule.stages * len(schedule.workers)


def _boundary_bytes(function: Function, module: Module) -> tuple[int, int]:
    """Bytes of the parameters and of the results that one rank holds; a value that occurs twice counts once."""
    sides = (dict.fromkeys(function.params), dict.fromkeys(function.results))
    reads, returns = (sum(value.type.local_nbytes(module.mesh) for value in values) for values in sides)
    return reads, returns


def op_table(module: Module) -> list[str]:
    """A row for each op name, by FLOPs, then by number of runs; ops without a sharding rule are marked."""
    runs = module.runs()
    calls, work = Counter[str](), Counter[str]()
    for function in module.functions:
        for op in function.ops:
            calls[op.name] += runs[function.name]
            work[op.name] += runs[function.name] * flops_of(op)
    total = max(1, work.total())
    rows = [
        (name, str(calls[name]), f"{amount(work[name])}FLOP", f"{work[name] / total:.1%}", _remark(name))
        for name in sorted(calls, key=lambda name: (-work[name], -calls[name], name))
    ]
    return aligned_table((*left("op"), *right("runs", "work", "share", "")), rows)


def _remark(name: str) -> str:
    return "" if name in OPS else "no rule: planned whole"


def result_table(module: Module, results: Sequence[Tensor], distances: Sequence[float] | None = None) -> list[str]:
    """A row for each result of the main function: type, spread and, if given, its distance from one device."""
    rows: list[tuple[str, ...]] = []
    for index, (value, tensor) in enumerate(zip(module.main.results, results, strict=True)):
        role = module.main.result_role(index)
        name = " ".join(word for word in (role.kind, role.label or value.name or str(index)) if word)
        numbers = tensor.double().flatten()
        spread = [numbers.mean(), numbers.min(), numbers.max()] if numbers.numel() else []
        cells = [f"{number.item():.6g}" for number in spread] or ["", "", ""]
        away = [] if distances is None else [f"{distances[index]:.1e}"]
        rows.append((name, render_type(value.type, module.mesh), *cells, *away))
    titles = ("type", "mean", "least", "most", *([] if distances is None else ["off by"]))
    return aligned_table((*left("result"), *right(*titles)), rows)
