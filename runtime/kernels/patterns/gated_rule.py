"""Rules for SwiGLU and GeGLU, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import pi, sqrt
from typing import Final

from moaic.ir.graph import Attr, Op
from moaic.runtime.kernels.patterns.match import CAST, AnyPattern, DefUse, Match, OpPattern, result_of
from moaic.runtime.kernels.patterns.rule import KernelBuilder, Replacement, first, matches, rows

_GATE: Final = AnyPattern("gate")
_UNDER: Final = result_of("aten.mul.Tensor", AnyPattern("grad"), AnyPattern("up"))


@dataclass(frozen=True, slots=True)
class _Act:
    """An activation of a gate: the operator, the pattern of its result, and the patterns of the gate's gradient."""

    operator: str
    acted: OpPattern
    of_gate: Sequence[OpPattern]
    attrs: Mapping[str, Attr] = field(default_factory=dict[str, Attr])

    @property
    def gated(self) -> OpPattern:
        return result_of("aten.mul.Tensor", self.acted, AnyPattern("up"))

    @property
    def of_up(self) -> OpPattern:
        return result_of("aten.mul.Tensor", AnyPattern("grad"), self.acted)


def _times(pattern: AnyPattern | OpPattern, factor: float) -> OpPattern:
    return result_of("aten.mul.Tensor", pattern, None, other=factor)


def _plus_one(pattern: AnyPattern | OpPattern) -> OpPattern:
    return result_of("aten.add.Tensor", pattern, None, other=1)


def _less_than_one(pattern: AnyPattern | OpPattern) -> OpPattern:
    return result_of("aten.sub.Tensor", None, pattern, self=1)


def _silu() -> _Act:
    share = result_of("aten.sigmoid", _GATE)

    def slope(rest: OpPattern) -> OpPattern:
        """The pattern of 1 + gate (1 - share); `rest` is that of the factor in brackets."""
        return _plus_one(result_of("aten.mul.Tensor", _GATE, rest))

    one = result_of("aten.full", size=AnyPattern("size"), fill_value=1)
    in_float32 = result_of("aten.mul.Tensor", result_of("aten.mul.Tensor", _UNDER, share), slope(_less_than_one(share)))
    in_16_bits = result_of(
        "aten.mul.Tensor", _UNDER, result_of("aten.mul.Tensor", share, slope(result_of("aten.sub.Tensor", one, share)))
    )
    return _Act("swiglu", result_of("aten.mul.Tensor", _GATE, share), (in_float32, in_16_bits))


def _gelu() -> _Act:
    """GELU; its derivative is the normal distribution function plus the gate times the normal density.

    The factor 1 / sqrt(2 pi) is spelled as PyTorch computes it.
    """
    below = _times(_plus_one(result_of("aten.erf", _times(_GATE, sqrt(0.5)))), 0.5)
    density = _times(
        result_of("aten.exp", _times(result_of("aten.mul.Tensor", _GATE, _GATE), -0.5)), 2 / sqrt(pi) * sqrt(0.5) * 0.5
    )
    slope = result_of("aten.add.Tensor", below, result_of("aten.mul.Tensor", _GATE, density))
    return _of_gelu(result_of("aten.gelu", _GATE), slope, "none")


def _gelu_tanh() -> _Act:
    square = result_of("aten.mul.Tensor", _GATE, _GATE)
    inner = result_of("aten.add.Tensor", _GATE, _times(result_of("aten.mul.Tensor", square, _GATE), 0.044715))
    tanh = result_of("aten.tanh", _times(inner, sqrt(2 / pi)))
    of_inner = _times(_plus_one(_times(square, 3 * 0.044715)), sqrt(2 / pi))
    of_tanh = _less_than_one(result_of("aten.mul.Tensor", tanh, tanh))
    along = result_of("aten.mul.Tensor", result_of("aten.mul.Tensor", _times(_GATE, 0.5), of_tanh), of_inner)
    slope = result_of("aten.add.Tensor", _times(_plus_one(tanh), 0.5), along)
    return _of_gelu(result_of("aten.gelu", _GATE, approximate="tanh"), slope, "tanh")


def _of_gelu(acted: OpPattern, slope: OpPattern, approximate: str) -> _Act:
    return _Act("geglu", acted, (result_of("aten.mul.Tensor", _UNDER, slope),), {"approximate": approximate})


_ACTS: Final = (_silu(), _gelu(), _gelu_tanh())


def forward(uses: DefUse, anchor: Op) -> Replacement | None:
    for found, act in _found(uses, anchor, lambda act: (act.gated,)):
        gate, up, (y,) = uses.before(found["gate"], CAST), found["up"], anchor.results
        work = KernelBuilder(loc=anchor.loc)
        (new,) = work.call(act.operator, [gate, up], [gate.type], **act.attrs)
        return Replacement("gated", rows(gate), gate.type.dtype, work.ops, {y: work.like(new, y)})
    return None


def backward(uses: DefUse, anchor: Op) -> Replacement | None:
    """Match the gradient of the gate, whose pattern binds all operands, then that of `up`."""
    for found, act in _found(uses, anchor, lambda act: act.of_gate):
        of_up = first(uses, act.of_up, found)
        if of_up is not None:
            gate, up, grad = uses.before(found["gate"], CAST), found["up"], found["grad"]
            work = KernelBuilder(loc=anchor.loc)
            dgate, dup = work.call(f"{act.operator}_backward", [gate, up, grad], [gate.type, up.type], **act.attrs)
            ends = ((anchor.results[0], dgate), (of_up["result"], dup))
            instead = {old: work.like(new, old) for old, new in ends}
            return Replacement("gated", rows(gate), gate.type.dtype, work.ops, instead)
    return None


def _found(uses: DefUse, anchor: Op, patterns: Callable[[_Act], Sequence[OpPattern]]) -> Iterator[tuple[Match, _Act]]:
    for act in _ACTS:
        for pattern in patterns(act):
            yield from ((found, act) for found in matches(uses, pattern, anchor) if _is_gated(found))


def _is_gated(found: Match) -> bool:
    """Whether all bound values have one shape."""
    return len({value.type.shape for value in found.values.values()}) == 1
