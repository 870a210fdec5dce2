"""SwiGLU and GeGLU, found forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import pi, sqrt
from typing import Final

from moaic.ir.graph import Attr, Op
from moaic.runtime.kernels.patterns.match import CAST, AnyPattern, Found, OpPattern, Sight, made
from moaic.runtime.kernels.patterns.rule import Replacement, Work, first, rows, ways

_GATE: Final = AnyPattern("gate")
_UNDER: Final = made("aten.mul.Tensor", AnyPattern("grad"), AnyPattern("up"))


@dataclass(frozen=True, slots=True)
class _Act:
    """What is done to a gate: our operator for it, how it is made, and in which ways the gradient of the gate is."""

    operator: str
    acted: OpPattern
    of_gate: Sequence[OpPattern]
    attrs: Mapping[str, Attr] = field(default_factory=dict[str, Attr])

    @property
    def gated(self) -> OpPattern:
        return made("aten.mul.Tensor", self.acted, AnyPattern("up"))

    @property
    def of_up(self) -> OpPattern:
        return made("aten.mul.Tensor", AnyPattern("grad"), self.acted)


def _times(pattern: AnyPattern | OpPattern, factor: float) -> OpPattern:
    return made("aten.mul.Tensor", pattern, None, other=factor)


def _plus_one(pattern: AnyPattern | OpPattern) -> OpPattern:
    return made("aten.add.Tensor", pattern, None, other=1)


def _less_than_one(pattern: AnyPattern | OpPattern) -> OpPattern:
    return made("aten.sub.Tensor", None, pattern, self=1)


def _silu() -> _Act:
    share = made("aten.sigmoid", _GATE)

    def slope(rest: OpPattern) -> OpPattern:
        """1 + gate (1 - share), where `rest` is what is in brackets."""
        return _plus_one(made("aten.mul.Tensor", _GATE, rest))

    one = made("aten.full", size=AnyPattern("size"), fill_value=1)
    in_float32 = made("aten.mul.Tensor", made("aten.mul.Tensor", _UNDER, share), slope(_less_than_one(share)))
    in_16_bits = made(
        "aten.mul.Tensor", _UNDER, made("aten.mul.Tensor", share, slope(made("aten.sub.Tensor", one, share)))
    )
    return _Act("swiglu", made("aten.mul.Tensor", _GATE, share), (in_float32, in_16_bits))


def _gelu() -> _Act:
    """The derivative is the distribution and the gate times the density, of a normal variable.

    The factor is PyTorch's 1 / sqrt(2 pi), as it computes it.
    """
    below = _times(_plus_one(made("aten.erf", _times(_GATE, sqrt(0.5)))), 0.5)
    density = _times(
        made("aten.exp", _times(made("aten.mul.Tensor", _GATE, _GATE), -0.5)), 2 / sqrt(pi) * sqrt(0.5) * 0.5
    )
    slope = made("aten.add.Tensor", below, made("aten.mul.Tensor", _GATE, density))
    return _of_gelu(made("aten.gelu", _GATE), slope, "none")


def _gelu_tanh() -> _Act:
    square = made("aten.mul.Tensor", _GATE, _GATE)
    inner = made("aten.add.Tensor", _GATE, _times(made("aten.mul.Tensor", square, _GATE), 0.044715))
    tanh = made("aten.tanh", _times(inner, sqrt(2 / pi)))
    of_inner = _times(_plus_one(_times(square, 3 * 0.044715)), sqrt(2 / pi))
    of_tanh = _less_than_one(made("aten.mul.Tensor", tanh, tanh))
    along = made("aten.mul.Tensor", made("aten.mul.Tensor", _times(_GATE, 0.5), of_tanh), of_inner)
    slope = made("aten.add.Tensor", _times(_plus_one(tanh), 0.5), along)
    return _of_gelu(made("aten.gelu", _GATE, approximate="tanh"), slope, "tanh")


def _of_gelu(acted: OpPattern, slope: OpPattern, approximate: str) -> _Act:
    return _Act("geglu", acted, (made("aten.mul.Tensor", _UNDER, slope),), {"approximate": approximate})


_ACTS: Final = (_silu(), _gelu(), _gelu_tanh())


def forward(sight: Sight, anchor: Op) -> Replacement | None:
    for found, act in _found(sight, anchor, lambda act: (act.gated,)):
        gate, up, (y,) = sight.before(found["gate"], CAST), found["up"], anchor.results
        work = Work(loc=anchor.loc)
        (new,) = work.call(act.operator, [gate, up], [gate.type], **act.attrs)
        return Replacement("gated", rows(gate), gate.type.dtype, work.ops, {y: work.like(new, y)})
    return None


def backward(sight: Sight, anchor: Op) -> Replacement | None:
    """The gradient of `up` is found by that of the gate, which names both."""
    for found, act in _found(sight, anchor, lambda act: act.of_gate):
        of_up = first(sight, act.of_up, found)
        if of_up is not None:
            gate, up, grad = sight.before(found["gate"], CAST), found["up"], found["grad"]
            work = Work(loc=anchor.loc)
            dgate, dup = work.call(f"{act.operator}_backward", [gate, up, grad], [gate.type, up.type], **act.attrs)
            ends = ((anchor.results[0], dgate), (of_up["result"], dup))
            instead = {old: work.like(new, old) for old, new in ends}
            return Replacement("gated", rows(gate), gate.type.dtype, work.ops, instead)
    return None


def _found(sight: Sight, anchor: Op, patterns: Callable[[_Act], Sequence[OpPattern]]) -> Iterator[tuple[Found, _Act]]:
    for act in _ACTS:
        for pattern in patterns(act):
            yield from ((found, act) for found in ways(sight, pattern, anchor) if _is_gated(found))


def _is_gated(found: Found) -> bool:
    """Whether all are of one shape."""
    return len({value.type.shape for value in found.values.values()}) == 1
