"""Convolutions, plain and transposed."""

from __future__ import annotations

from math import prod

from moaic.ir.graph import Op
from moaic.ir.ops.declaration import Kind, OpDecl
from moaic.ir.ops.rule_building import attr_int, operand_types, rule_of_factors, wanted_gradients
from moaic.ir.rules import Rule


def _factors(op: Op, spatial: int) -> tuple[list[str], list[str], list[str]]:
    """Factors of input, weight and output of a convolution with `spatial` window dims."""
    xs, ks, ys = ([f"{p}{i}!" for i in range(spatial)] for p in "xky")
    if attr_int(op, "groups", 1) != 1:
        return ["n", "ci!", *xs], ["wo!", "wi!", *ks], ["n", "co!", *ys]
    weight = ["i", "o", *ks] if op.attrs.get("transposed", False) else ["o", "i", *ks]
    return ["n", "i", *xs], weight, ["n", "o", *ys]


def _whole(factor: str, *specs: list[str]) -> list[list[str]]:
    """The specs with one factor marked whole."""
    return [[f"{name}!" if name == factor else name for name in dims] for dims in specs]


def _convolution(op: Op) -> Rule:
    """With a bias the input channels are whole: each term of a split sum would add the bias once."""
    x, w, y = _factors(op, len(operand_types(op)[0].shape) - 2)
    if len(operand_types(op)) == 2:
        return rule_of_factors(op, [x, w], [y], (0,), (1,))
    x, w = _whole("i", x, w)
    return rule_of_factors(op, [x, w, [y[1]]], [y], (0, 2), (1, 2))


def _convolution_backward(op: Op) -> Rule:
    """With the gradient of a bias the output channels are whole: an attribute states their number."""
    x, w, y = _factors(op, len(operand_types(op)[0].shape) - 2)
    if wanted_gradients(op)[2]:
        x, w, y = _whole("o", x, w, y)
    specs = [x, w, [y[1]]]
    reads = [frozenset({0, 2}), frozenset({0, 1}), frozenset({0})]
    chosen = [i for i, wanted in enumerate(wanted_gradients(op)) if wanted]
    rule = rule_of_factors(op, [y, x, w], [specs[i] for i in chosen], (0,))
    return Rule(rule.operands, rule.results, rule.sizes, rule.whole, rule.linear, tuple(reads[i] for i in chosen))


def _flops(op: Op) -> int:
    """Each element of the result, or of the input of a transposed one, meets every weight of its group once."""
    x, w = operand_types(op)[:2]
    points = x if op.attrs.get("transposed", False) else op.results[0].type
    return 2 * points.elements() * (prod(w.shape) // w.shape[0])


def _flops_backward(op: Op) -> int:
    """A convolution each for the gradients of input and weight, as far as they are wanted."""
    y, x, w = operand_types(op)[:3]
    points = x if op.attrs.get("transposed", False) else y
    return 2 * sum(wanted_gradients(op)[:2]) * points.elements() * (prod(w.shape) // w.shape[0])


OPS = (
    OpDecl("aten.convolution", _convolution, Kind.HEAVY, _flops, "convolution"),
    OpDecl("aten.convolution_backward", _convolution_backward, Kind.HEAVY, _flops_backward, "convolution_backward"),
)
