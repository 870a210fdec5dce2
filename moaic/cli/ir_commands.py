"""Commands on IR text: verify, show, run, opt and kernels. Each returns its exit code and raises Diagnostic."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from moaic.cli.exit_codes import WRONG
from moaic.cli.input_files import read_closed_module, read_module, read_with_places
from moaic.cli.random_inputs import check_runnable, random_inputs
from moaic.cli.render import as_comment, op_table, result_table, sizes, summary
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Function, Module
from moaic.ir.ops import declaration_of
from moaic.ir.parser import Parsed
from moaic.ir.printer import render, render_function
from moaic.ir.specialize import in_example
from moaic.support.cache_folder import cache_folder
from moaic.support.output import writing
from moaic.text.tables import aligned_row, fitted, left

TOLERANCE: Final = 1e-4
"""Largest distance of ranks from one device, relative to the largest element: they sum float32 in another order."""


def verify(chosen: argparse.Namespace) -> int:
    """`moaic verify`: prints the size of every file that is well formed."""
    for path in chosen.files:
        print(f"{path}: {sizes(read_module(path))}: well formed")
    return 0


def show(chosen: argparse.Namespace) -> int:
    """`moaic show`: prints a summary and the text, statistics of the ops, or one function."""
    module = read_module(chosen.file)
    if chosen.func is not None:
        print(render_function(_function(module, chosen.func), module.mesh), end="")
        return 0
    print(as_comment(summary(module)), end="")
    print(as_comment(op_table(module)) if chosen.stats else render(module), end="")
    return 0


def _function(module: Module, name: str) -> Function:
    wanted = name.removeprefix("@")
    for function in module.functions:
        if function.name == wanted:
            return function
    names = ", ".join(f"@{function.name}" for function in module.functions)
    raise Diagnostic(f"there is no function `@{wanted}`", hint=f"the file has {names or 'none'}")


def opt(chosen: argparse.Namespace) -> int:
    """`moaic opt`: prints the text after passes, or the list of passes."""
    from moaic.passes.pass_options import usage
    from moaic.passes.registry import PASSES, run_passes

    if chosen.list:
        rows = [(usage(each), each.summary) for each in PASSES.values()]
        columns = fitted(left("", ""), rows)
        print("\n".join(aligned_row(columns, row) for row in rows))
    elif chosen.file is None:
        raise Diagnostic("no file is given", hint="`moaic opt FILE -p outline,dp=2`; --list describes the passes")
    else:
        parsed = read_with_places(chosen.file)
        with _blamed_on_text(parsed):
            made = run_passes(parsed.module, chosen.passes)
        print(render(made), end="")
    return 0


@contextmanager
def _blamed_on_text(parsed: Parsed) -> Generator[None]:
    """An error of ours within the block becomes that of the first op of the text that PyTorch does not take."""
    try:
        yield
    except Diagnostic:
        raise
    except Exception as error:
        from moaic.check.op_types import wrong_ops

        wrong = next(wrong_ops(parsed), None)
        if wrong is None:
            raise
        raise wrong from error


def run(chosen: argparse.Namespace) -> int:
    """`moaic run`: prints type and spread of each result; with --ranks also its distance from one device."""
    parsed = read_with_places(chosen.file)
    with _blamed_on_text(parsed):
        return _run(in_example(parsed.module), chosen)


def _run(module: Module, chosen: argparse.Namespace) -> int:
    check_runnable(module)
    from moaic.check.distance import distance
    from moaic.runtime.interpreter import run_function, run_ranks

    inputs = random_inputs(module.main, chosen.seed)
    if not chosen.ranks:
        print("\n".join(result_table(module, run_function(module, module.main.name, inputs))))
        return 0
    results = run_ranks(module, inputs)
    local = next((op for each in module.functions for op in each.ops if declaration_of(op).rank_local), None)
    if local is not None:
        print(f"note: {local.name} is run by ranks alone: there is no other result to compare with", file=sys.stderr)
        print("\n".join(result_table(module, results)))
        return 0
    distances = list(map(distance, results, run_function(module, module.main.name, inputs)))
    print("\n".join(result_table(module, results, distances)))
    if max(distances, default=0) <= TOLERANCE:
        return 0
    print("error: the ranks do not compute what the function says", file=sys.stderr)
    return WRONG


def kernels(chosen: argparse.Namespace) -> int:
    """`moaic kernels`: compiles a plan's functions for a GPU, remembers the kernels for the planner and prints them."""
    from moaic.predict import kernel_report
    from moaic.predict.kernel_cache import MadeKernels
    from moaic.runtime.host.gpu_specs import target_of

    target = target_of(chosen.target)
    made = list(kernel_report.made_of(kernel_report.program_of(read_closed_module(chosen.file)), target))
    MadeKernels(target, cache_folder(os.environ)).remember(each.row for each in made)
    if chosen.output is not None:
        with writing(chosen.output):
            kernel_report.save(chosen.output, made, target)
    print("\n".join(kernel_report.lines([each.row for each in made])))
    return 0
