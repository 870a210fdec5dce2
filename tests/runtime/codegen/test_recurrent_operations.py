"""The operations of recurrent layers are counted alike where plans are priced and where kernels are listed."""

from __future__ import annotations

import torch
from torch import Tensor

from moaic.ir.graph import Op, Value
from moaic.ir.op_names import RECURRENT, RECURRENT_BACKWARD
from moaic.ir.ops.registry import flops_of
from moaic.ir.types import TensorType
from moaic.runtime.codegen.recurrent_layers import flops


def value(tensor: Tensor) -> Value:
    return Value(TensorType("f32", tuple(tensor.shape)))


def test_operations_are_counted_alike() -> None:
    time, rows, width, hidden = 5, 3, 4, 6
    x, state = torch.zeros(time, rows, width), torch.zeros(1, rows, hidden)
    params = [torch.zeros(3 * hidden, width), torch.zeros(3 * hidden, hidden), torch.zeros(3 * hidden)]
    operands = (value(x), (value(state),), tuple(map(value, params)))
    forward = 2 * time * rows * 3 * hidden * (width + hidden)
    assert flops(x, [state], params, "gru") == flops_of(Op(RECURRENT, operands)) == forward
    backward = Op(RECURRENT_BACKWARD, (None, (value(x), None), *operands))
    assert flops(None, [x, None], x, [state], params, "gru") == flops_of(backward) == 3 * forward
