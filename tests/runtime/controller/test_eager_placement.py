"""Eager ops on real workers compared with the host: replicated, sharded, mixed operands, views."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moaic.ir.errors import Diagnostic
from moaic.ir.layout import Layout, Split
from moaic.runtime.controller.buffer import View, whole
from moaic.runtime.protocol.placement import Placement
from tests.runtime.controller.eager_device import ALONE, COLUMNS, PLACES, ROWS, WHOLE, Device, view

ATEN: Any = torch.ops.aten


@pytest.mark.parametrize("one", PLACES)
@pytest.mark.parametrize("other", PLACES)
def test_two_operands_lying_anyhow(device: Device, one: Placement | None, other: Placement | None) -> None:
    x, y = torch.randn(4, 5), torch.randn(4, 5)
    a, b, out, product = device.up(x, one), device.up(y, other), device.new(4, 5), device.new(4, 4)
    device.launch("aten.add.Tensor", (a, b), [out], alpha=2)
    assert torch.equal(device.down(out), x + 2 * y)
    device.launch("aten.mm", (a, view(b, Tensor.t)), [product])
    torch.testing.assert_close(device.down(product), x @ y.t())
    rest, a.rests = a.place, True
    device.launch("aten.mul_.Tensor", (a, b))
    assert torch.equal(device.down(a), x * y)
    assert a.place == rest
    assert torch.equal(device.down(b), y)


@pytest.mark.parametrize("place", PLACES)
def test_broadcast_and_scalars(device: Device, place: Placement | None) -> None:
    x, row, column = torch.randn(4, 5), torch.randn(5), torch.randn(4, 1)
    a, b, c, out = device.up(x, place), device.up(row), device.up(column), device.new(4, 5)
    device.launch("aten.add.Tensor", (a, b), [out])
    device.launch("aten.mul_.Tensor", (out, c))
    device.launch("aten.div_.Tensor", (out, torch.tensor(3.0)))
    torch.testing.assert_close(device.down(out), (x + row) * column / 3.0, rtol=0, atol=0)


def test_a_split_operand_that_is_broadcast(device: Device) -> None:
    x, big = torch.randn(4, 5), torch.randn(3, 4, 5)
    a, b, out = device.up(x, ROWS), device.up(big), device.new(3, 4, 5)
    device.launch("aten.add.Tensor", (b, a), [out])
    assert out.place is not None
    assert out.place.layout == Layout((Split("dp", 1, 2),))
    assert torch.equal(device.down(out), big + x)


@pytest.mark.parametrize("place", PLACES)
def test_in_place_ops_on_views_change_the_buffer(device: Device, place: Placement | None) -> None:
    x = torch.randn(4, 5)
    a = device.up(x, place)
    device.launch("aten.add_.Scalar", (view(a, lambda t: t[1:3, ::2]), 1))
    device.launch("aten.copy_", (view(a, lambda t: t.t()[4]), device.up(torch.arange(4.0))))
    device.launch("aten.mul_.Scalar", (view(a, Tensor.t), 2))
    x[1:3, ::2] += 1
    x.t()[4].copy_(torch.arange(4.0))
    x *= 2
    assert torch.equal(device.down(a), x)
    assert torch.equal(device.down(view(a, lambda t: t[2])), x[2])


def test_two_written_views_of_one_split_buffer(device: Device) -> None:
    x = torch.randn(4, 5)
    a = device.up(x, ROWS)
    device.launch("aten._foreach_add_.Scalar", ([view(a, lambda t: t[0]), view(a, lambda t: t[3])], 1.0))
    x[0] += 1
    x[3] += 1
    assert torch.equal(device.down(a), x)


def test_memory_order_is_kept(device: Device) -> None:
    x = torch.randn(5, 4).t()
    a, out = device.up(x, ROWS), device.accelerator.buffer("f32", (4, 5), (1, 4))
    device.launch("aten.neg", (a,), [out])
    flat = View(out, (20,), (1,), 0, torch.float32)
    assert torch.equal(device.down(flat), -x.t().reshape(20))
    b = device.up(x)
    assert torch.equal(device.down(View(b, (20,), (1,), 0, torch.float32)), x.t().reshape(20))


class Optimized:
    """Three parameters with gradients and two states on the device, and the same here."""

    def __init__(self, device: Device, params: Placement | None, grads: Placement) -> None:
        self.values, self.slopes = [torch.randn(4, 5) for _ in range(3)], [torch.randn(4, 5) for _ in range(3)]
        self.p = [device.up(value, params) for value in self.values]
        self.g = [device.up(slope, grads) for slope in self.slopes]
        self.m, self.v = [device.new(4, 5) for _ in self.p], [device.new(4, 5) for _ in self.p]
        self.steps = [device.new() for _ in self.p]
        for buffer in (*self.m, *self.v, *self.steps):
            device.accelerator.fill(buffer, 0.0)


@pytest.mark.parametrize("params", PLACES)
@pytest.mark.parametrize("grads", [ROWS, COLUMNS, WHOLE])
def test_fused_adamw(device: Device, params: Placement | None, grads: Placement) -> None:
    at = Optimized(device, params, grads)
    numbers: dict[str, Any] = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
    reference = [torch.nn.Parameter(value.clone()) for value in at.values]
    for parameter, slope in zip(reference, at.slopes, strict=True):
        parameter.grad = slope
    optimizer = torch.optim.AdamW(reference, lr=0.1, fused=True)
    for _ in range(2):
        device.launch("aten._foreach_add_.Scalar", (at.steps, 1))
        device.launch(
            "aten._fused_adamw_", (at.p, at.g, at.m, at.v, [], at.steps), amsgrad=False, maximize=False, **numbers
        )
        optimizer.step()
    for got, expected in zip(at.p, reference, strict=True):
        torch.testing.assert_close(device.down(got), expected.detach(), rtol=1e-6, atol=1e-7)
    if grads != WHOLE and params in (None, grads, WHOLE):
        assert all(buffer.place is not None and buffer.place.layout == grads.layout for buffer in (*at.m, *at.v))


@pytest.mark.parametrize("params", PLACES)
@pytest.mark.parametrize("grads", [ROWS, COLUMNS, WHOLE])
def test_foreach_updates(device: Device, params: Placement | None, grads: Placement) -> None:
    at = Optimized(device, params, grads)
    m, v = [torch.zeros(4, 5) for _ in at.p], [torch.zeros(4, 5) for _ in at.p]
    for _ in range(2):
        device.launch("aten._foreach_lerp_.Scalar", (at.m, at.g, 0.1))
        device.launch("aten._foreach_mul_.Scalar", (at.v, 0.9))
        device.launch("aten._foreach_addcmul_.Scalar", (at.v, at.g, at.g, 0.1))
        roots = [device.new(4, 5) for _ in at.p]
        device.launch("aten._foreach_sqrt", (at.v,), roots)
        device.launch("aten._foreach_add_.Scalar", (roots, 1.0))
        device.launch("aten._foreach_addcdiv_.ScalarList", (at.p, at.m, roots, [-0.1, -0.2, -0.3]))
        ATEN._foreach_lerp_(m, at.slopes, 0.1)
        ATEN._foreach_mul_(v, 0.9)
        ATEN._foreach_addcmul_(v, at.slopes, at.slopes, 0.1)
        ATEN._foreach_addcdiv_(at.values, m, [each.sqrt() + 1.0 for each in v], [-0.1, -0.2, -0.3])
    for got, expected in zip((*at.p, *at.m), (*at.values, *m), strict=True):
        torch.testing.assert_close(device.down(got), expected, rtol=1e-6, atol=1e-7)


def test_a_fused_optimizer_whose_operands_lie_otherwise(device: Device) -> None:
    """To write a view, a worker lays a parameter in the order that the person sees; gradients are row-major."""
    value, slope, momentum = torch.randn(5, 4).t(), torch.randn(4, 5), torch.randn(4, 5)
    p, g, m = device.up(value), device.up(slope), device.up(momentum)
    device.launch("aten.mul_.Scalar", (view(p, lambda t: t.t()[2]), 3.0))
    numbers: dict[str, Any] = {"weight_decay": 0.1, "momentum": 0.9, "lr": 0.5, "dampening": 0.0}
    rest = {**numbers, "nesterov": False, "maximize": False, "is_first_step": False}
    device.launch("aten._fused_sgd_", ([p], [g], [m]), **rest)
    value[:, 2] *= 3
    momentum = 0.9 * momentum + slope + 0.1 * value
    torch.testing.assert_close(device.down(p), value - 0.5 * momentum)
    torch.testing.assert_close(device.down(m), momentum)


def test_whole_numbers_divided_by_padding(device: Device) -> None:
    a, wholes, rest = (
        device.up(torch.full((4, 5), 3.0), COLUMNS),
        device.accelerator.buffer("i64", (4, 5)),
        device.accelerator.buffer("i64", (4, 5)),
    )
    device.launch("aten._to_copy", (a,), [wholes], dtype=torch.int64)
    assert wholes.place == COLUMNS
    device.launch("aten.remainder.Scalar_Tensor", (7, wholes), [rest])
    assert torch.equal(device.down(rest), torch.full((4, 5), 1))
    row = device.accelerator.buffer("i64", (5,))
    device.launch("aten.remainder.Scalar_Tensor", (7, view(wholes, lambda t: t[1])), [row])
    assert torch.equal(device.down(row), torch.full((5,), 1))


def test_lists_of_buffers_on_different_meshes(device: Device) -> None:
    values = [torch.randn(4, 5) for _ in range(4)]
    buffers = [device.up(value, place) for value, place in zip(values, (ROWS, ALONE, WHOLE, None), strict=True)]
    device.launch("aten._foreach_mul_.Scalar", (buffers, 2.0))
    total = [device.new(4, 5) for _ in values]
    device.launch("aten._foreach_add.List", (buffers, buffers), total)
    for buffer, both, value in zip(buffers, total, values, strict=True):
        assert torch.equal(device.down(buffer), 2 * value)
        assert torch.equal(device.down(both), 4 * value)


def test_out_arguments_and_several_results(device: Device) -> None:
    x = torch.randn(4, 5)
    a, out, values, indices = (
        device.up(x, ROWS),
        device.new(4, 5),
        device.new(4),
        device.accelerator.buffer("i64", (4,)),
    )
    device.launch("aten.exp.out", (a,), out=whole(out))
    device.launch("aten.max.dim", (a, 1), [values, indices])
    assert torch.equal(device.down(out), x.exp())
    assert torch.equal(device.down(values), x.max(1).values)
    assert torch.equal(device.down(indices), x.max(1).indices)


def test_lists_of_operands_that_are_not_elementwise(device: Device) -> None:
    x, y = torch.randn(4, 5), torch.randn(4, 5)
    out, norms = device.new(8, 5), [device.new(), device.new()]
    a, b = device.up(x, ROWS), device.up(y, WHOLE)
    device.launch("aten.cat", ([a, b], 0), [out])
    device.launch("aten._foreach_norm.Scalar", ([a, b], 2), norms)
    assert torch.equal(device.down(out), torch.cat([x, y]))
    torch.testing.assert_close(device.down(norms[0]), x.norm())


def test_values_that_were_never_sent(device: Device) -> None:
    buffer = device.new(2, 3)
    device.accelerator.fill(buffer, 1.5)
    assert torch.equal(device.down(view(buffer, lambda t: t[0])), torch.full((3,), 1.5))
    device.accelerator.upload(buffer, torch.arange(6.0).view(2, 3))
    assert torch.equal(device.down(view(buffer, Tensor.t)), torch.arange(6.0).view(2, 3).t())
    assert buffer.place is None


def test_new_values_for_a_buffer_at_rest(device: Device) -> None:
    a = device.up(torch.zeros(4, 5), ROWS)
    y = torch.randn(4, 5)
    device.accelerator.upload(a, y)
    assert a.place == ROWS
    assert torch.equal(device.down(a), y)
    device.accelerator.fill(a, 2)
    assert torch.equal(device.down(a), torch.full((4, 5), 2.0))


def test_an_upload_is_a_copy(device: Device) -> None:
    x = torch.zeros(4, 5)
    a = device.up(x)
    x += 1
    assert torch.equal(device.down(a), torch.zeros(4, 5))


def test_buffers_that_nobody_holds_are_freed(device: Device) -> None:
    device.accelerator.synchronize()
    before = device.accelerator.stats().workers[0].buffers
    held = [device.up(torch.randn(4, 5), ROWS) for _ in range(5)]
    assert device.accelerator.stats().workers[0].buffers == before + 5
    del held
    assert device.accelerator.stats().workers[0].buffers == before


def test_random_ops_are_refused(device: Device) -> None:
    with pytest.raises(Diagnostic, match="draws random numbers"):
        device.launch("aten.normal_", (device.new(4), 0.0, 1.0))


def test_what_cannot_be_sent_is_refused(device: Device) -> None:
    with pytest.raises(TypeError, match="an argument of type Tensor"):
        device.launch("aten.add.Tensor", (device.new(4), torch.ones(4)), [device.new(4)])


def test_many_different_slices_are_forgotten_again(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moaic.runtime.controller.eager_ops.MOST_PREPARED", 8)
    x = torch.randn(4, 5)
    a = device.up(x, ROWS)
    for row in range(4):
        for column in range(5):
            device.launch("aten.mul_.Scalar", (View(a, (), (), 5 * row + column, torch.float32), row - column))
    factors = torch.tensor([[row - column for column in range(5)] for row in range(4)])
    assert torch.equal(device.down(a), x * factors)
