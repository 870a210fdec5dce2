"""Cases of convolutions, plain and transposed."""

from __future__ import annotations

from torch import Tensor

from moaic.ir.graph import Attr
from tests.ir.op_cases.drawing import Case, Cases, Drawn, case

cases = Cases()


def convolved(d: Drawn) -> tuple[Tensor, Tensor, dict[str, Attr]]:
    """Input, weight and geometry of a convolution over one or two dims."""
    spatial, groups, transposed = d.number(1, 2), d.pick(1, 1, 1, 2, 3), d.pick(False, False, True)
    ins, outs = (groups * d.pick(1, 2, 3, 4) for _ in range(2))
    window = [d.number(1, 3) for _ in range(spatial)]
    x = d.fine(d.pick(1, 2, 3, 4, 5), ins, *(size + d.number(0, 3) for size in window))
    weight = d.fine(*((ins, outs // groups) if transposed else (outs, ins // groups)), *window)
    attrs: dict[str, Attr] = {
        "stride": (d.pick(1, 2),) * spatial,
        "padding": (0,) * spatial if transposed else (d.pick(0, 1),) * spatial,
        "dilation": (1,) * spatial,
        "transposed": transposed,
        "output_padding": (0,) * spatial,
        "groups": groups,
    }
    return x, weight, attrs


@cases("convolution")
def convolution(d: Drawn, name: str) -> Case:
    x, weight, attrs = convolved(d)
    outs = weight.shape[1] * (attrs["groups"] if isinstance(attrs["groups"], int) else 1)
    bias = d.fine(outs if attrs["transposed"] else weight.shape[0]) if d.pick(False, False, True) else None
    return case(name, x, weight, bias, **attrs)


@cases("convolution_backward")
def convolution_backward(d: Drawn, name: str) -> Case:
    x, weight, attrs = convolved(d)
    forward = case("aten.convolution", x, weight, None, **attrs)
    grad = d.fine(*forward.op.results[0].type.shape)
    mask = d.pick(
        (True, True, True), (True, True, False), (False, True, False), (True, False, True), (False, False, True)
    )
    attrs = {"bias_sizes": (grad.shape[1],) if mask[2] else None, **attrs, "output_mask": mask}
    return case(name, grad, x, weight, **attrs)
