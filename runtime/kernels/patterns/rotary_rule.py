"""Rules for rotary position embedding, forward and backward."""

from __future__ import annotations

from typing import Final

from moaic.ir.graph import Op
from moaic.runtime.kernels.patterns.match import CAST, AnyPattern, DefUse, Match, result_of
from moaic.runtime.kernels.patterns.rule import KernelBuilder, Replacement, as_type, matches

_FORWARD: Final = result_of(
    "aten.add.Tensor",
    result_of("aten.mul.Tensor", AnyPattern("x"), AnyPattern("cos")),
    result_of(
        "aten.mul.Tensor",
        result_of(
            "aten.cat",
            (
                result_of(
                    "aten.neg",
                    result_of(
                        "aten.slice.Tensor", AnyPattern("x"), dim=3, start=AnyPattern("half"), end=AnyPattern("width")
                    ),
                ),
                result_of("aten.slice.Tensor", AnyPattern("x"), dim=3, start=0, end=AnyPattern("half")),
            ),
            dim=3,
        ),
        AnyPattern("sin"),
    ),
)
_TURNED: Final = result_of("aten.mul.Tensor", AnyPattern("x"), AnyPattern("sin"))
_BACKWARD: Final = result_of(
    "aten.add.Tensor",
    result_of(
        "aten.add.Tensor",
        result_of(
            "aten.constant_pad_nd",
            result_of("aten.neg", result_of("aten.slice.Tensor", _TURNED, dim=3, start=0, end=AnyPattern("half"))),
            pad=AnyPattern("before"),
        ),
        result_of(
            "aten.constant_pad_nd",
            result_of("aten.slice.Tensor", _TURNED, dim=3, start=AnyPattern("half"), end=AnyPattern("width")),
            pad=AnyPattern("after"),
        ),
    ),
    result_of("aten.mul.Tensor", AnyPattern("x"), AnyPattern("cos")),
)


def forward(uses: DefUse, anchor: Op) -> Replacement | None:
    return _turned(uses, anchor, next(filter(_is_rotary, matches(uses, _FORWARD, anchor)), None), "rotary")


def backward(uses: DefUse, anchor: Op) -> Replacement | None:
    found = next(filter(_is_rotary, matches(uses, _BACKWARD, anchor)), None)
    half = None if found is None else found.attrs["half"]
    if found is None or (found.attrs["before"], found.attrs["after"]) != ((half, 0), (0, half)):
        return None
    return _turned(uses, anchor, found, "rotary_backward")


def _turned(uses: DefUse, anchor: Op, found: Match | None, name: str) -> Replacement | None:
    """The replacement by an operator; None if the result has more precision than x, to which the kernel rounds."""
    if found is None:
        return None
    x = uses.before(found["x"], CAST)
    y = as_type(uses, anchor.results[0], x.type)
    if y.type != x.type:
        return None
    work = KernelBuilder(loc=anchor.loc)
    (new,) = work.call(name, [x, found["cos"], found["sin"]], [x.type])
    return Replacement("rotary", x.type.shape, x.type.dtype, work.ops, {y: new})


def _is_rotary(found: Match) -> bool:
    """Whether heads rotate by half of their width, and all heads by the same angles."""
    shape, cos, sin = (found[name].type.shape for name in ("x", "cos", "sin"))
    if len(shape) != 4:
        return False
    batch, _, length, width = shape
    return (
        (found.attrs["half"], found.attrs["width"]) == (width // 2, width)
        and width % 2 == 0
        and cos == sin
        and cos in ((1, 1, length, width), (batch, 1, length, width))
    )
