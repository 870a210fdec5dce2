"""The command line: `moaic COMMAND FILE`. Each command is one function from parsed arguments to printed text.

A person's mistake is printed to standard error and ends with exit code 2; anything else that fails is a bug of ours and
crashes with its trace.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Function, Module, Op
from moaic.ir.ops import OPS, flops_of
from moaic.ir.printer import render, render_function
from moaic.ir.verify import load

MISTAKE = 2
"""Exit code for a person's mistake."""

WRONG = 1
"""Exit code where the ranks of a plan compute something else than one device."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code."""
    try:
        chosen = _parser().parse_args(arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else MISTAKE
    try:
        code: int = chosen.command(chosen)
        sys.stdout.flush()
    except Diagnostic as error:
        print(error, file=sys.stderr)
        return MISTAKE
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("moaic", description="Read, check, change and run programs of the moaic compiler.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    verify = commands.add_parser("verify", help="check that files are well formed")
    return 0
    verify.add_argument("files", nargs="+", metavar="FILE", help="IR text; - is standard input")
    verify.set_defaults(command=_verify)

    show = commands.add_parser("show", help="print a summary, then the text")
    show.add_argument("file", metavar="FILE", help="IR text; - is standard input")
    show.add_argument("--func", metavar="NAME", help="only this function's text")
    show.add_argument("--stats", action="store_true", help="count ops and FLOPs instead of printing the text")
    show.set_defaults(command=_show)

    run = commands.add_parser("run", help="run the last function on random inputs, by the reference interpreter")
    run.add_argument("file", metavar="FILE", help="IR text; - is standard input")
    run.add_argument("--ranks", action="store_true", help="run on the ranks of the mesh, all in this process, as well")
    run.add_argument("--seed", type=int, default=0, metavar="N", help="of the random inputs (default: %(default)s)")
    run.set_defaults(command=_run)
    return parser


def read(path: str) -> Module:
    """The well-formed module in a file, or in standard input for `-`."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise Diagnostic(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise Diagnostic(f"cannot read {path}: it is no text ({error.reason} at byte {error.start})") from None
    return load(text, "<stdin>" if path == "-" else path)


def _verify(chosen: argparse.Namespace) -> int:
    for path in chosen.files:
        module = read(path)
        ops = sum(len(function.ops) for function in module.functions)
        print(f"{path}: {_count(len(module.functions), 'function')}, {_count(ops, 'op')}: well formed")
    return 0


def _show(chosen: argparse.Namespace) -> int:
    module = read(chosen.file)
    if chosen.func is not None:
        print(render_function(_named(module, chosen.func), module.mesh), end="")
        return 0
    _print_comment(_summary(module))
    if chosen.stats:
        _print_comment(_op_table(module))
    else:
        print(render(module), end="")
    return 0


def _run(chosen: argparse.Namespace) -> int:
    """Prints what the results are like; on ranks also how far they are from those of whole tensors."""
    module = read(chosen.file)
    if not module.functions:
        raise Diagnostic(f"{chosen.file} has no function to run")
    from moaic.trial import random_inputs, run_on_ranks, run_whole

    inputs = random_inputs(module.main, chosen.seed)
    report = run_on_ranks(module, inputs) if chosen.ranks else run_whole(module, inputs)
    print("\n".join(_table(report.head, report.rows)))
    if not report.agrees:
        print("error: the ranks do not compute what the function says", file=sys.stderr)
    return 0 if report.agrees else WRONG


def _print_comment(lines: Iterable[str]) -> None:
    """Prints lines so that whoever reads the output as IR passes over them."""
    print("\n".join(f"// {line}".rstrip() for line in lines), end="\n\n")


def _named(module: Module, name: str) -> Function:
    for function in module.functions:
        if function.name == name.removeprefix("@"):
            return function
    names = ", ".join(f"@{function.name}" for function in module.functions)
    raise Diagnostic(f"there is no function `@{name.removeprefix('@')}`", hint=f"the file has {names or 'none'}")


def runs_of(module: Module) -> Counter[str]:
    """How often each function runs when the main function runs once."""
    runs = Counter[str]()
    if module.functions:
        runs[module.main.name] = 1
    for function in reversed(module.functions):
        for op in function.ops:
            if op.name == "call":
                runs[op.callee] += runs[function.name]
    return runs


def _summary(module: Module) -> list[str]:
    """The whole in one line, then a line per function."""
    runs = runs_of(module)
    flops = {function.name: sum(map(flops_of, function.ops)) for function in module.functions}
    total = sum(runs[name] * flops[name] for name in flops)
    ops = sum(len(function.ops) for function in module.functions)
    mesh = f", mesh {module.mesh} of {_count(module.mesh.ranks, 'rank')}" if module.mesh.axes else ""
    head = f"{_count(len(module.functions), 'function')}, {_count(ops, 'op')}{mesh}, {_amount(total)}FLOP a run"
    rows = [
        (
            f"@{function.name}",
            str(runs[function.name]),
            str(len(function.ops)),
            f"{_amount(flops[function.name])}FLOP",
            *(f"{_amount(size)}B" for size in _ends(function, module)),
        )
        for function in module.functions
    ]
    return [head, "", *_table(("function", "runs", "ops", "work", "reads", "returns"), rows)]


def _ends(function: Function, module: Module) -> tuple[int, int]:
    """Bytes of the parameters and of the results that one rank holds."""
    ends = (dict.fromkeys(function.params), dict.fromkeys(function.results))
    reads, returns = (sum(value.type.local_nbytes(module.mesh) for value in values) for values in ends)
    return reads, returns


def _op_table(module: Module) -> list[str]:
    """Ops by how much they compute, then by how often they run; those without a rule are marked."""
    runs = runs_of(module)
    count, work = Counter[str](), Counter[str]()
    for function, op in _all_ops(module):
        count[op.name] += runs[function.name]
        work[op.name] += runs[function.name] * flops_of(op)
    total = max(1, work.total())
    names = sorted(count, key=lambda name: (-work[name], -count[name], name))
    rows = [
        (name, str(count[name]), f"{_amount(work[name])}FLOP", f"{work[name] / total:.1%}", _remark(name))
        for name in names
    ]
    return _table(("op", "runs", "work", "share", ""), rows)


def _all_ops(module: Module) -> Iterable[tuple[Function, Op]]:
    return ((function, op) for function in module.functions for op in function.ops)


def _remark(name: str) -> str:
    return "" if name in OPS else "no rule: planned whole"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """The first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]

    def line(row: tuple[str, ...]) -> str:
        first, *rest = zip(row, widths, strict=True)
        return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)])

    return [line(row) for row in (head, *rows)]


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def _amount(number: float) -> str:
    """Three digits and a decimal prefix, ending in a space or the prefix: `1.23 G`."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(number) < 999.5:
            return f"{number:.3g} {prefix}"
        number /= 1000
    return f"{number:.3g} P"
