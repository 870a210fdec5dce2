"""Cases of recurrent layers and their gradients."""

from __future__ import annotations

from torch import Tensor

from moaic.ir.graph import Attr
from moaic.runtime.codegen.lower_to_fx import run_op
from tests.ir.op_cases.drawing import Case, Cases, Drawn, case

cases = Cases()


def layers(d: Drawn) -> tuple[Tensor, list[Tensor | None], list[Tensor | None], dict[str, Attr]]:
    """Input, states, parameters and attributes."""
    mode, num_layers, directions = d.pick("lstm", "gru", "rnn_tanh", "rnn_relu"), d.pick(1, 2), d.pick(1, 2)
    has_biases = d.pick(True, False)
    time, batch, features, hidden = d.number(1, 4), d.size(), d.number(1, 3), d.number(2, 3)
    out = 1 if mode == "lstm" and d.pick(True, False) else hidden
    rows = {"lstm": 4, "gru": 3}.get(mode, 1) * hidden
    params: list[Tensor | None] = []
    for index in range(num_layers * directions):
        params += [d.fine(rows, features if index < directions else directions * out), d.fine(rows, out)]
        params += [d.fine(rows) for _ in range(2 * has_biases)]
        params += [d.fine(out, hidden)] if out != hidden else []
    sizes = [out, hidden] if mode == "lstm" else [hidden]
    states: list[Tensor | None] = [d.fine(num_layers * directions, batch, size) for size in sizes]
    attrs: dict[str, Attr] = {
        "mode": mode,
        "batch_sizes": (),
        "has_biases": has_biases,
        "num_layers": num_layers,
        "bidirectional": directions > 1,
    }
    return d.fine(time, batch, features), states, params, attrs


@cases("moai.recurrent")
def recurrent(d: Drawn, name: str) -> Case:
    x, states, params, attrs = layers(d)
    return case(name, x, states, params, **attrs, saved=d.pick(0, 3))


@cases("moai.recurrent_backward")
def recurrent_backward(d: Drawn, name: str) -> Case:
    x, states, params, attrs = layers(d)
    forward = case("moai.recurrent", x, states, params, **attrs, saved=2)
    *results, record = run_op(forward.op, forward.tensors)
    grads: list[Tensor | None] = [d.fine(*result.shape) for result in results]
    if d.pick(True, False):
        grads[1] = None
    wanted = (True, *(d.pick(True, False) for _ in (*states, *params)))
    return case(name, d.pick(record, None), grads, x, states, params, **attrs, wanted=wanted)
