"""Cases of attention and its backward."""

from __future__ import annotations

import torch
from torch import Tensor

from moaic.ir.graph import Attr
from moaic.runtime.codegen.lower_to_fx import run_op
from tests.ir.op_cases.drawing import Case, Cases, Drawn, case

cases = Cases()


def attention(d: Drawn) -> tuple[list[Tensor | None], dict[str, Attr]]:
    """Query, key, value and mask, and the attributes."""
    b, h = d.pick(1, 2, 3, 4), d.pick(1, 2, 3, 4, 6)
    rows, columns, width = d.number(1, 5), d.number(1, 5), d.pick(2, 4)
    wide = width if d.pick(True, False) else 3
    mask = d.pick("none", "causal", "truths", "numbers")
    shape = d.pick(
        (b, 1, rows, columns), (b, h, rows, columns), (1, 1, rows, columns), (1, h, 1, columns), (rows, columns)
    )
    given = d.fine(*shape) if mask == "numbers" else None
    if mask == "truths":
        # Every row may look at something.
        given = d.bools(*shape) | (torch.arange(columns) == 0)
    query, key, value = d.fine(b, h, rows, width), d.fine(b, h, columns, width), d.fine(b, h, columns, wide)
    return [query, key, value, given], {"is_causal": mask == "causal", "scale": d.pick(0.5, 0.25)}


@cases("moai.sdpa")
def sdpa(d: Drawn, name: str) -> Case:
    tensors, attrs = attention(d)
    return case(name, *tensors, **attrs)


@cases("moai.sdpa_backward")
def sdpa_backward(d: Drawn, name: str) -> Case:
    (query, key, value, mask), attrs = attention(d)
    forward = case("moai.sdpa", query, key, value, mask, **attrs)
    out, logsumexp = run_op(forward.op, forward.tensors)
    return case(name, d.fine(*out.shape), query, key, value, out, logsumexp, mask, **attrs)
