"""Recurrent layers in programs: what they record serves their backward, and their operations are counted alike."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moaic.ir.graph import Op, Value
from moaic.ir.op_names import RECURRENT, RECURRENT_BACKWARD
from moaic.ir.ops.registry import flops_of
from moaic.ir.types import TensorType
from moaic.ir.verify import load
from moaic.runtime.codegen import recurrent_layers
from moaic.runtime.codegen.compile import compile_function
from moaic.runtime.codegen.recurrent_layers import flops

TIME, ROWS, WIDTH, HIDDEN = 5, 3, 4, 6
SAVED = {"lstm": 40, "gru": 53, "rnn_tanh": 16}
"""Values of a record for each row and time step."""


def value(tensor: Tensor) -> Value:
    return Value(TensorType("f32", tuple(tensor.shape)))


@pytest.mark.parametrize("is_recorded", [False, True])
def test_operations_are_counted_alike(is_recorded: bool) -> None:
    x, state = torch.zeros(TIME, ROWS, WIDTH), torch.zeros(1, ROWS, HIDDEN)
    record = torch.zeros(TIME, ROWS, SAVED["gru"])
    params = [torch.zeros(3 * HIDDEN, WIDTH), torch.zeros(3 * HIDDEN, HIDDEN), torch.zeros(3 * HIDDEN)]
    operands = (value(x), (value(state),), tuple(map(value, params)))
    forward = 2 * TIME * ROWS * 3 * HIDDEN * (WIDTH + HIDDEN)
    assert flops(x, [state], params, "gru") == flops_of(Op(RECURRENT, operands)) == forward
    backward = Op(RECURRENT_BACKWARD, (value(record) if is_recorded else None, (value(x), None), *operands))
    counted = flops(record if is_recorded else None, [x, None], x, [state], params, "gru")
    assert counted == flops_of(backward) == (2 if is_recorded else 3) * forward


Compute = Callable[[list[Tensor]], list[Tensor]]


def functions(mode: str, *, compiled: bool) -> tuple[Compute, Compute, list[Tensor]]:
    """A layer forward and backward, each as a function of a program, and the operands of both."""
    rows = {"lstm": 4, "gru": 3}.get(mode, 1) * HIDDEN
    states = 1 + (mode == "lstm")
    out, state = f"f32[{TIME}, {ROWS}, {HIDDEN}]", f"f32[1, {ROWS}, {HIDDEN}]"
    record = f"f32[{TIME}, {ROWS}, {SAVED[mode]}]"
    made = f"{out}, {', '.join([state] * states)}, {record}"
    operands = {"%x": f"f32[{TIME}, {ROWS}, {WIDTH}]", "%w": f"f32[{rows}, {WIDTH}]", "%u": f"f32[{rows}, {HIDDEN}]"}
    operands |= {f"%h{index}": state for index in range(states)}
    given = f"%x, [{', '.join(f'%h{index}' for index in range(states))}], [%w, %u]"
    attrs = f'mode = "{mode}", batch_sizes = [], has_biases = false, num_layers = 1, bidirectional = false'
    params = ", ".join(f"{name}: {type_}" for name, type_ in operands.items())
    last = ", ".join(f"%l{index}" for index in range(states))
    forward = f"""func @forward({params}) -> ({out}, {record}) {{
      %y, {last}, %r = moai.recurrent {given} {{{attrs}, saved = {SAVED[mode]}}} : {made}
      return %y, %r
    }}"""
    wanted = ", ".join(["true", *["false"] * states, "true", "true"])
    found = f"{operands['%x']}, {operands['%w']}, {operands['%u']}"
    backward = f"""func @backward(%r: {record}, %g: {out}, {params}) -> ({found}) {{
      %1, %2, %3 = moai.recurrent_backward %r, [%g{", _" * states}], {given} {{{attrs}, wanted = [{wanted}]}} : {found}
      return %1, %2, %3
    }}"""
    torch.manual_seed(0)
    run, differentiate = (load(text).main for text in (forward, backward))
    tensors = [torch.randn(param.type.shape) for param in run.params]
    return compile_function(run, compiled=compiled), compile_function(differentiate, compiled=compiled), tensors


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`")  # torch's own, of its own code
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mode", [*SAVED])
def test_backward_differentiates_what_forward_has_recorded(
    mode: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Any] = []
    record_layers: Any = recurrent_layers._record  # pyright: ignore[reportPrivateUsage]

    def record_and_count(*args: Any) -> Any:
        runs.append(args)
        return record_layers(*args)

    monkeypatch.setattr(recurrent_layers, "_record", record_and_count)
    forward, backward, operands = functions(mode, compiled=compiled)
    grad = torch.randn(TIME, ROWS, HIDDEN)
    wanted = backward([torch.zeros(TIME, ROWS, SAVED[mode]), grad, *operands])
    assert len(runs) == 1, "a record that was copied has lost what was recorded"
    out, record = forward([*operands])
    again = [each.clone() for each in operands]
    # Memory that programs reuse, while the values are made again elsewhere.
    x, matrix, *_ = operands
    for each in (out, x):
        each.fill_(float("nan"))
    assert all(map(torch.equal, backward([record, grad, *again]), wanted))
    assert len(runs) == 2
    matrix.fill_(float("nan"))
    assert all(map(torch.equal, backward([record, grad, *again]), wanted))
    assert len(runs) == 3, "a parameter was overwritten"


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_what_stands_for_a_record_takes_no_memory() -> None:
    before = resident()
    record = recurrent_layers._without_memory(torch.zeros(1), (1 << 10, 1 << 10, 1 << 8))  # pyright: ignore[reportPrivateUsage]
    assert record.is_contiguous()
    assert record.nbytes == record.untyped_storage().nbytes() == 1 << 30
    assert resident() - before < 1 << 26
