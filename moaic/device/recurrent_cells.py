"""The fused LSTM and GRU cells, composed of other ops.

torch calls them on each device but the CPU, so CPU workers have no kernels for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor


def _sum_rows(gradient: Tensor) -> Tensor:
    return gradient.sum(0)


def lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """New hidden state, new cell state, and the four gates after their activations."""
    gates = input_gates + hidden_gates
    if input_bias is not None and hidden_bias is not None:
        gates = gates + input_bias + hidden_bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the gates, of the old cell state, and of a bias."""
    if grad_hy is None and grad_cy is None:
        return None, None, None
    i, f, g, o = workspace.chunk(4, 1)
    squashed = cy.tanh()
    d_out = torch.zeros_like(cy) if grad_hy is None else grad_hy
    d_cell = d_out * o * (1 - squashed * squashed)
    if grad_cy is not None:
        d_cell = d_cell + grad_cy
    gates = torch.cat(
        [
            d_cell * g * i * (1 - i),
            d_cell * cx * f * (1 - f),
            d_cell * i * (1 - g * g),
            d_out * squashed * o * (1 - o),
        ],
        1,
    )
    return gates, d_cell * f, _sum_rows(gates) if has_bias else None


def gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """New hidden state, and the saved reset, update and new gates, old state, and hidden part of the new gate."""
    given = input_gates if input_bias is None else input_gates + input_bias
    hidden = hidden_gates if hidden_bias is None else hidden_gates + hidden_bias
    ir, iz, in_ = given.chunk(3, 1)
    hr, hz, hn = hidden.chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (in_ + r * hn).tanh()
    return (hx - n) * z + n, torch.cat([r, z, n, hx, hn], 1)


def gru_cell_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of the input gates, the hidden gates, the old state, and of the two biases."""
    r, z, n, hx, hn = workspace.chunk(5, 1)
    d_n = grad_hy * (1 - z) * (1 - n * n)
    d_z = grad_hy * (hx - n) * z * (1 - z)
    d_r = d_n * hn * r * (1 - r)
    given = torch.cat([d_r, d_z, d_n], 1)
    hidden = torch.cat([d_r, d_z, d_n * r], 1)
    given_bias, hidden_bias = (_sum_rows(given), _sum_rows(hidden)) if has_bias else (None, None)
    return given, hidden, grad_hy * z, given_bias, hidden_bias


KERNELS: Final[Mapping[str, Callable[..., Any]]] = {
    "aten::_thnn_fused_lstm_cell": lstm_cell,
    "aten::_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
    "aten::_thnn_fused_gru_cell": gru_cell,
    "aten::_thnn_fused_gru_cell_backward": gru_cell_backward,
}
"""By torch's name of the op."""
