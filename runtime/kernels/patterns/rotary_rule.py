"""Rotary position embedding, found forward and backward."""

from __future__ import annotations

from typing import Final

from moaic.ir.graph import Op
from moaic.runtime.kernels.patterns.match import CAST, AnyPattern, Found, Sight, made
from moaic.runtime.kernels.patterns.rule import Replacement, Work, as_type, ways

_FORWARD: Final = made(
    "aten.add.Tensor",
    made("aten.mul.Tensor", AnyPattern("x"), AnyPattern("cos")),
    made(
        "aten.mul.Tensor",
        made(
            "aten.cat",
            (
                made(
                    "aten.neg",
                    made(
                        "aten.slice.Tensor", AnyPattern("x"), dim=3, start=AnyPattern("half"), end=AnyPattern("width")
                    ),
                ),
                made("aten.slice.Tensor", AnyPattern("x"), dim=3, start=0, end=AnyPattern("half")),
            ),
            dim=3,
        ),
        AnyPattern("sin"),
    ),
)
_TURNED: Final = made("aten.mul.Tensor", AnyPattern("x"), AnyPattern("sin"))
_BACKWARD: Final = made(
    "aten.add.Tensor",
    made(
        "aten.add.Tensor",
        made(
            "aten.constant_pad_nd",
            made("aten.neg", made("aten.slice.Tensor", _TURNED, dim=3, start=0, end=AnyPattern("half"))),
            pad=AnyPattern("before"),
        ),
        made(
            "aten.constant_pad_nd",
            made("aten.slice.Tensor", _TURNED, dim=3, start=AnyPattern("half"), end=AnyPattern("width")),
            pad=AnyPattern("after"),
        ),
    ),
    made("aten.mul.Tensor", AnyPattern("x"), AnyPattern("cos")),
)


def forward(sight: Sight, anchor: Op) -> Replacement | None:
    return _turned(sight, anchor, next(filter(_is_rotary, ways(sight, _FORWARD, anchor)), None), "rotary")


def backward(sight: Sight, anchor: Op) -> Replacement | None:
    found = next(filter(_is_rotary, ways(sight, _BACKWARD, anchor)), None)
    half = None if found is None else found.attrs["half"]
    if found is None or (found.attrs["before"], found.attrs["after"]) != ((half, 0), (0, half)):
        return None
    return _turned(sight, anchor, found, "rotary_backward")


def _turned(sight: Sight, anchor: Op, found: Found | None, name: str) -> Replacement | None:
    """What comes out is rounded as what goes in is: where more of it is kept, nothing is changed."""
    if found is None:
        return None
    x = sight.before(found["x"], CAST)
    y = as_type(sight, anchor.results[0], x.type)
    if y.type != x.type:
        return None
    work = Work(loc=anchor.loc)
    (new,) = work.call(name, [x, found["cos"], found["sin"]], [x.type])
    return Replacement("rotary", x.type.shape, x.type.dtype, work.ops, {y: new})


def _is_rotary(found: Found) -> bool:
    """Whether heads turn by half of their width, and all of them by the same angles."""
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
