"""Cases of products of matrices."""

from __future__ import annotations

import torch

from tests.ir.op_cases.drawing import Case, Cases, Drawn, case

cases = Cases()


@cases("moai.scaled_mm")
def scaled_mm(d: Drawn, name: str) -> Case:
    m, k, n = d.size(), d.pick(16, 32, 96, 24), d.pick(16, 32, 96, 24)
    left, right = (d.real(*shape).to(torch.float8_e4m3fn) for shape in ((m, k), (k, n)))
    scales = (d.unit(m, 1), d.unit(1, n)) if d.pick(False, True) else (d.unit(1, 1), d.unit(1, 1))
    return case(name, left, right, *scales, dtype="f64")


@cases("mm bmm")
def matrices(d: Drawn, name: str) -> Case:
    m, k, n = d.size(), d.size(), d.size()
    lead = (d.size(),) if name == "aten.bmm" else ()
    return case(name, d.fine(*lead, m, k), d.fine(*lead, k, n))
