"""Cases of instructions that are computed like other ops: `moai.add_to`."""

from __future__ import annotations

from tests.ir.op_cases.drawing import Case, Cases, Drawn, case

cases = Cases()


@cases("moai.add_to")
def add_to(d: Drawn, name: str) -> Case:
    shape = d.shape()
    return case(name, d.real(*shape), d.real(*shape))
