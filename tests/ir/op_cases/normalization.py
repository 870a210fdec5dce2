"""Cases of softmax and layer norm, forward and backward."""

from __future__ import annotations

from torch import Tensor

from moaic.runtime.codegen.lower_to_fx import run_op
from tests.ir.op_cases.drawing import Case, Cases, Drawn, case

cases = Cases()


@cases("_softmax _log_softmax")
def softmax(d: Drawn, name: str) -> Case:
    shape = d.shape()
    return case(name, d.real(*shape), dim=d.dim(len(shape)), half_to_float=False)


@cases("_softmax_backward_data _log_softmax_backward_data")
def softmax_backward(d: Drawn, name: str) -> Case:
    shape = d.shape()
    return case(name, d.fine(*shape), d.unit(*shape), dim=d.dim(len(shape)), input_dtype="f64")


@cases("native_layer_norm")
def native_layer_norm(d: Drawn, name: str) -> Case:
    shape = d.shape(1)
    normal = shape[d.number(0, len(shape) - 1) :]
    weight, bias = (d.fine(*normal) if d.pick(True, False) else None for _ in range(2))
    return case(name, d.fine(*shape), weight, bias, normalized_shape=normal, eps=1e-5)


@cases("native_layer_norm_backward")
def native_layer_norm_backward(d: Drawn, name: str) -> Case:
    forward = native_layer_norm(d, "aten.native_layer_norm")
    x, weight, bias = forward.tensors
    _, mean, rstd = run_op(forward.op, forward.tensors)
    assert isinstance(x, Tensor)
    mask = (d.pick(True, False), weight is not None, bias is not None)
    mask = mask if any(mask) else (True, *mask[1:])
    normal = forward.op.attrs["normalized_shape"]
    grad = d.fine(*x.shape)
    return case(name, grad, x, mean, rstd, weight, bias, normalized_shape=normal, output_mask=mask)
