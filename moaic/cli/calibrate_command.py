"""`moaic calibrate`: measures this machine anew, and the kernels that the best plans of a step use on it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from moaic.cli.input_files import read_closed_module
from moaic.runtime.host.selection import current_flavor
from moaic.support.output import write_output
from moaic.text.tables import Column, aligned_table

if TYPE_CHECKING:
    from moaic.ir.graph import Module
    from moaic.passes.perf.machine import Machine

RATES = (Column("rate"), Column(align=">"), Column("unit"), Column("source"))
KERNELS = (Column("kernel"), Column("by rates [ms]", ">"), Column("measured [ms]", ">"))

GIGA = 1e9


def calibrate(chosen: argparse.Namespace) -> int:
    """Prints what was measured; writes the machine as JSON, for `moaic guide --machine`, if a file is named."""
    from moaic.passes.perf import machine_text
    from moaic.support.this_machine import measured_anew

    step = None if chosen.step is None else read_closed_module(chosen.step)
    current_flavor(os.environ)
    machine = measured_anew()
    print(f"{machine.name}, {machine.workers} workers\n")
    print("\n".join(aligned_table(RATES, [*_rates(machine)])), flush=True)
    if step is not None:
        machine = _with_kernels(step, machine)
    if chosen.output is not None:
        write_output(chosen.output, machine_text.to_text(machine) + "\n")
    return 0


def _rates(machine: Machine) -> Iterator[tuple[str, ...]]:
    """Rows of the numbers of a machine."""
    yield "memory", _short(machine.bandwidth.value / GIGA), "GB/s", str(machine.bandwidth.source)
    yield "call", _short(machine.call_overhead.value * 1e6), "us", str(machine.call_overhead.source)
    for name, number in sorted(machine.flops.items()):
        yield name, _short(number.value / GIGA), "GFLOP/s", str(number.source)
    for name, link in sorted(machine.links.items()):
        yield name, _short(link.rate.value / GIGA), "GB/s", str(link.rate.source)
        yield f"{name}, start", _short(link.latency.value * 1e6), "us", str(link.latency.source)


def _with_kernels(step: Module, machine: Machine) -> Machine:
    """The machine with the kernels of the step's best plans, which are printed."""
    from moaic.passes.config import Request
    from moaic.planner.measured import SHORT, by_rates
    from moaic.planner.search import search
    from moaic.planner.worker import InProcessPool
    from moaic.support.kernel_profile import measured_kernels

    selection = search(step, machine, Request(), pool=InProcessPool(), measure=measured_kernels)
    known = selection.machine.kernels
    print(f"\nplan: {selection.search_result.selected}")
    if not known:
        print(f"steps below {1000 * SHORT:.0f} ms are priced by rates alone")
        return selection.machine
    rows = [
        (_op(text), _short(1e3 * by_rates(text, machine)), _short(1e3 * number.value))
        for text, number in sorted(known.items(), key=lambda item: -item[1].value)
    ]
    print("\n".join(["", *aligned_table(KERNELS, rows)]))
    return selection.machine


def _op(text: str) -> str:
    """The op of a kernel with the types of what it reads, each once."""
    from moaic.ir.layout import Mesh
    from moaic.ir.parser import parse
    from moaic.ir.printer import render_type

    (op,) = parse(text).functions[0].ops
    types = dict.fromkeys(render_type(value.type, Mesh()) for value in op.inputs())
    return f"{op.name} {', '.join(types)}"


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"
