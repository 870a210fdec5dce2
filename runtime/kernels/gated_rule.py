"""SwiGLU, found forward and backward."""

from __future__ import annotations

from typing import Final

from moaic.ir.graph import Op
from moaic.runtime.kernels.match import CAST, Found, Made, Sight, Some, made
from moaic.runtime.kernels.rule import Rewrite, Work, first, rows, ways

_SHARE: Final = made("aten.sigmoid", Some("gate"))
_ACTED: Final = made("aten.mul.Tensor", Some("gate"), _SHARE)
_GATED: Final = made("aten.mul.Tensor", _ACTED, Some("up"))
_OF_UP: Final = made("aten.mul.Tensor", Some("grad"), _ACTED)
_UNDER: Final = made("aten.mul.Tensor", Some("grad"), Some("up"))


def _slope(rest: Made) -> Made:
    """1 + gate (1 - share), where `rest` is what is in brackets."""
    return made("aten.add.Tensor", made("aten.mul.Tensor", Some("gate"), rest), None, other=1)


_OF_GATE: Final = (
    made(
        "aten.mul.Tensor",
        made("aten.mul.Tensor", _UNDER, _SHARE),
        _slope(made("aten.sub.Tensor", None, _SHARE, self=1)),
    ),
    made(
        "aten.mul.Tensor",
        _UNDER,
        made(
            "aten.mul.Tensor",
            _SHARE,
            _slope(made("aten.sub.Tensor", made("aten.full", size=Some("size"), fill_value=1), _SHARE)),
        ),
    ),
)
"""As it is taken apart in float32, and in shorter types."""


def forward(sight: Sight, anchor: Op) -> Rewrite | None:
    found = next(filter(_is_gated, ways(sight, _GATED, anchor)), None)
    if found is None:
        return None
    gate, up, (y,) = sight.before(found["gate"], CAST), found["up"], anchor.results
    work = Work(loc=anchor.loc)
    (new,) = work.call("swiglu", [gate, up], [gate.type])
    return Rewrite("gated", rows(gate), gate.type.dtype, work.ops, {y: work.like(new, y)})


def backward(sight: Sight, anchor: Op) -> Rewrite | None:
    """The gradient of `up` is found by that of the gate, which names both."""
    possible = (found for pattern in _OF_GATE for found in ways(sight, pattern, anchor))
    for found in filter(_is_gated, possible):
        of_up = first(sight, _OF_UP, found)
        if of_up is not None:
            gate, up, grad = sight.before(found["gate"], CAST), found["up"], found["grad"]
            work = Work(loc=anchor.loc)
            dgate, dup = work.call("swiglu_backward", [gate, up, grad], [gate.type, up.type])
            ends = ((anchor.results[0], dgate), (of_up["result"], dup))
            instead = {old: work.like(new, old) for old, new in ends}
            return Rewrite("gated", rows(gate), gate.type.dtype, work.ops, instead)
    return None


def _is_gated(found: Found) -> bool:
    """Whether all are of one shape."""
    return len({value.type.shape for value in found.values.values()}) == 1
