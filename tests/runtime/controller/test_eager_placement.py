"""Eager ops on real workers compared with the host: replicated, sharded, mixed operands, views, deferred forwards."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from moaic.ir.errors import Diagnostic
from moaic.ir.layout import Layout, Mesh, Split
from moaic.runtime.controller.accelerator import Accelerator
from moaic.runtime.controller.buffer import Buffer, View, whole
from moaic.runtime.controller.deferred_forward import DeferredForward
from moaic.runtime.dtypes import DTYPE_NAMES, DTYPES
from moaic.runtime.protocol.placement import Placement

DP = Mesh((("dp", 2),))
ROWS = Placement(DP, Layout((Split("dp", 0, 2),)))
COLUMNS = Placement(DP, Layout((Split("dp", 1, 3),)))
WHOLE = Placement(DP)
ALONE = Placement()

PROGRAM = """// moai 1
mesh [{mesh}]
func @main(%x: f32[4{rows}, 6{columns}] input "x") -> (f32[4{rows}, 6{columns}]) {{
  return %x
}}
"""
TEXTS = {
    ROWS: PROGRAM.format(mesh="dp=2", rows="{dp}", columns=""),
    COLUMNS: PROGRAM.format(mesh="dp=2", rows="", columns="{dp}"),
    WHOLE: PROGRAM.format(mesh="dp=2", rows="", columns=""),
    ALONE: PROGRAM.format(mesh="", rows="", columns=""),
}


class Device:
    """An accelerator and short names for what the tests do with it."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._programs = {place: accelerator.load(text, compiled=False) for place, text in TEXTS.items()}

    def up(self, tensor: Tensor, place: Placement | None = None) -> Buffer:
        """A buffer with the value of `tensor`, in its memory order, at rest as `place` says."""
        buffer = self.accelerator.buffer(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), tensor.stride())
        self.accelerator.upload(buffer, tensor)
        if place is not None:
            self.accelerator.run(self._programs[place], [buffer], [None])
            assert buffer.place == place
        return buffer

    def new(self, *shape: int) -> Buffer:
        return self.accelerator.buffer("f32", shape)

    def down(self, buffer: Buffer | View) -> Tensor:
        return self.accelerator.download(whole(buffer) if isinstance(buffer, Buffer) else buffer)

    def launch(self, op: str, args: Sequence[Any], outputs: Sequence[Buffer] = (), /, **kwargs: Any) -> None:
        self.accelerator.launch(op, tuple(_whole(arg) for arg in args), kwargs, outputs)


def _whole(arg: Any) -> Any:
    if isinstance(arg, Buffer):
        return whole(arg)
    return [_whole(each) for each in cast("list[Any]", arg)] if isinstance(arg, list) else arg


@pytest.fixture(scope="module")
def device(two: Accelerator) -> Device:
    return Device(two)


def view(buffer: Buffer, change: Callable[[Tensor], Tensor]) -> View:
    """The view that `change` makes of a buffer's first tensor."""
    base = torch.empty_strided(buffer.shape, buffer.strides, dtype=DTYPES[buffer.dtype])
    seen = change(base)
    return View(buffer, tuple(seen.shape), seen.stride(), int(seen.storage_offset()), seen.dtype)


ATEN: Any = torch.ops.aten

PLACES = [None, ROWS, COLUMNS, WHOLE, ALONE]


@pytest.mark.parametrize("one", PLACES)
@pytest.mark.parametrize("other", PLACES)
def test_two_operands_lying_anyhow(device: Device, one: Placement | None, other: Placement | None) -> None:
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    a, b, out, product = device.up(x, one), device.up(y, other), device.new(4, 6), device.new(4, 4)
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
    x, row, column = torch.randn(4, 6), torch.randn(6), torch.randn(4, 1)
    a, b, c, out = device.up(x, place), device.up(row), device.up(column), device.new(4, 6)
    device.launch("aten.add.Tensor", (a, b), [out])
    device.launch("aten.mul_.Tensor", (out, c))
    device.launch("aten.div_.Tensor", (out, torch.tensor(3.0)))
    torch.testing.assert_close(device.down(out), (x + row) * column / 3.0, rtol=0, atol=0)


def test_a_split_operand_that_is_broadcast(device: Device) -> None:
    x, big = torch.randn(4, 6), torch.randn(3, 4, 6)
    a, b, out = device.up(x, ROWS), device.up(big), device.new(3, 4, 6)
    device.launch("aten.add.Tensor", (b, a), [out])
    assert out.place is not None
    assert out.place.layout == Layout((Split("dp", 1, 2),))
    assert torch.equal(device.down(out), big + x)


@pytest.mark.parametrize("place", PLACES)
def test_in_place_ops_on_views_change_the_buffer(device: Device, place: Placement | None) -> None:
    x = torch.randn(4, 6)
    a = device.up(x, place)
    device.launch("aten.add_.Scalar", (view(a, lambda t: t[1:3, ::2]), 1))
    device.launch("aten.copy_", (view(a, lambda t: t.t()[5]), device.up(torch.arange(4.0))))
    device.launch("aten.mul_.Scalar", (view(a, Tensor.t), 2))
    x[1:3, ::2] += 1
    x.t()[5].copy_(torch.arange(4.0))
    x *= 2
    assert torch.equal(device.down(a), x)
    assert torch.equal(device.down(view(a, lambda t: t[2])), x[2])


def test_two_written_views_of_one_split_buffer(device: Device) -> None:
    x = torch.randn(4, 6)
    a = device.up(x, ROWS)
    device.launch("aten._foreach_add_.Scalar", ([view(a, lambda t: t[0]), view(a, lambda t: t[3])], 1.0))
    x[0] += 1
    x[3] += 1
    assert torch.equal(device.down(a), x)


def test_memory_order_is_kept(device: Device) -> None:
    x = torch.randn(6, 4).t()
    a, out = device.up(x, ROWS), device.accelerator.buffer("f32", (4, 6), (1, 4))
    device.launch("aten.neg", (a,), [out])
    flat = View(out, (24,), (1,), 0, torch.float32)
    assert torch.equal(device.down(flat), -x.t().reshape(24))
    b = device.up(x)
    assert torch.equal(device.down(View(b, (24,), (1,), 0, torch.float32)), x.t().reshape(24))


class Optimized:
    """Three parameters with gradients and two states on the device, and the same here."""

    def __init__(self, device: Device, params: Placement | None, grads: Placement) -> None:
        self.values, self.slopes = [torch.randn(4, 6) for _ in range(3)], [torch.randn(4, 6) for _ in range(3)]
        self.p = [device.up(value, params) for value in self.values]
        self.g = [device.up(slope, grads) for slope in self.slopes]
        self.m, self.v = [device.new(4, 6) for _ in self.p], [device.new(4, 6) for _ in self.p]
        self.steps = [device.new() for _ in self.p]
        for buffer in (*self.m, *self.v, *self.steps):
            device.accelerator.fill(buffer, 0.0)


@pytest.mark.parametrize("params", PLACES)
@pytest.mark.parametrize("grads", [ROWS, WHOLE])
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
    if grads == ROWS and params in (None, ROWS, WHOLE):
        assert all(buffer.place is not None and buffer.place.layout == ROWS.layout for buffer in (*at.m, *at.v))


@pytest.mark.parametrize("params", PLACES)
@pytest.mark.parametrize("grads", [ROWS, WHOLE])
def test_foreach_updates(device: Device, params: Placement | None, grads: Placement) -> None:
    at = Optimized(device, params, grads)
    m, v = [torch.zeros(4, 6) for _ in at.p], [torch.zeros(4, 6) for _ in at.p]
    for _ in range(2):
        device.launch("aten._foreach_lerp_.Scalar", (at.m, at.g, 0.1))
        device.launch("aten._foreach_mul_.Scalar", (at.v, 0.9))
        device.launch("aten._foreach_addcmul_.Scalar", (at.v, at.g, at.g, 0.1))
        roots = [device.new(4, 6) for _ in at.p]
        device.launch("aten._foreach_sqrt", (at.v,), roots)
        device.launch("aten._foreach_add_.Scalar", (roots, 1.0))
        device.launch("aten._foreach_addcdiv_.ScalarList", (at.p, at.m, roots, [-0.1, -0.2, -0.3]))
        ATEN._foreach_lerp_(m, at.slopes, 0.1)
        ATEN._foreach_mul_(v, 0.9)
        ATEN._foreach_addcmul_(v, at.slopes, at.slopes, 0.1)
        ATEN._foreach_addcdiv_(at.values, m, [each.sqrt() + 1.0 for each in v], [-0.1, -0.2, -0.3])
    for got, expected in zip((*at.p, *at.m), (*at.values, *m), strict=True):
        torch.testing.assert_close(device.down(got), expected, rtol=1e-6, atol=1e-7)


def test_lists_of_buffers_on_different_meshes(device: Device) -> None:
    values = [torch.randn(4, 6) for _ in range(4)]
    buffers = [device.up(value, place) for value, place in zip(values, (ROWS, ALONE, WHOLE, None), strict=True)]
    device.launch("aten._foreach_mul_.Scalar", (buffers, 2.0))
    total = [device.new(4, 6) for _ in values]
    device.launch("aten._foreach_add.List", (buffers, buffers), total)
    for buffer, both, value in zip(buffers, total, values, strict=True):
        assert torch.equal(device.down(buffer), 2 * value)
        assert torch.equal(device.down(both), 4 * value)


def test_out_arguments_and_several_results(device: Device) -> None:
    x = torch.randn(4, 6)
    a, out, values, indices = (
        device.up(x, ROWS),
        device.new(4, 6),
        device.new(4),
        device.accelerator.buffer("i64", (4,)),
    )
    device.launch("aten.exp.out", (a,), out=whole(out))
    device.launch("aten.max.dim", (a, 1), [values, indices])
    assert torch.equal(device.down(out), x.exp())
    assert torch.equal(device.down(values), x.max(1).values)
    assert torch.equal(device.down(indices), x.max(1).indices)


def test_lists_of_operands_that_are_not_elementwise(device: Device) -> None:
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    out, norms = device.new(8, 6), [device.new(), device.new()]
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
    a = device.up(torch.zeros(4, 6), ROWS)
    y = torch.randn(4, 6)
    device.accelerator.upload(a, y)
    assert a.place == ROWS
    assert torch.equal(device.down(a), y)
    device.accelerator.fill(a, 2)
    assert torch.equal(device.down(a), torch.full((4, 6), 2.0))


def test_an_upload_is_a_copy(device: Device) -> None:
    x = torch.zeros(4, 6)
    a = device.up(x)
    x += 1
    assert torch.equal(device.down(a), torch.zeros(4, 6))


def test_buffers_that_nobody_holds_are_freed(device: Device) -> None:
    device.accelerator.synchronize()
    before = device.accelerator.stats().workers[0].buffers
    held = [device.up(torch.randn(4, 6), ROWS) for _ in range(5)]
    assert device.accelerator.stats().workers[0].buffers == before + 5
    del held
    assert device.accelerator.stats().workers[0].buffers == before


def test_random_ops_are_refused(device: Device) -> None:
    with pytest.raises(Diagnostic, match="draws random numbers"):
        device.launch("aten.normal_", (device.new(4), 0.0, 1.0))


def test_what_cannot_be_sent_is_refused(device: Device) -> None:
    with pytest.raises(TypeError, match="an argument of type Tensor"):
        device.launch("aten.add.Tensor", (device.new(4), torch.ones(4)), [device.new(4)])


class Forward:
    """A pending forward that doubles a buffer, and how often it ran."""

    def __init__(self, device: Device, given: Buffer) -> None:
        self.runs = 0
        self._device = device
        self._given = given
        self.out = device.new(4, 6)
        self.promise = DeferredForward(self._run, [given], [self.out])
        device.accelerator.promise(self.promise)

    def _run(self) -> None:
        self.runs += 1
        self._device.launch("aten.mul.Tensor", (self._given, torch.tensor(2.0)), [self.out])


def test_a_promise_is_kept_when_its_value_is_read(device: Device) -> None:
    x = torch.randn(4, 6)
    forward = Forward(device, device.up(x))
    half = device.new(4, 6)
    device.launch("aten.div.Tensor", (forward.out, torch.tensor(4.0)), [half])
    device.launch("aten.add_.Scalar", (half, 1))
    assert half.promise is forward.promise
    assert forward.runs == 0
    assert torch.equal(device.down(half), x / 2 + 1)
    assert forward.runs == 1
    assert half.promise is None
    assert device.accelerator.pending is None


def test_a_larger_program_can_keep_a_promise(device: Device) -> None:
    x = torch.randn(4, 6)
    a = device.up(x, ROWS)
    forward = Forward(device, a)
    more = device.new(4, 6)
    device.launch("aten.add.Scalar", (forward.out, 1), [more])
    program = device.accelerator.load(TEXTS[ROWS], compiled=False)
    device.accelerator.run(program, [a], [forward.out], fulfils=forward.promise)
    assert forward.runs == 0
    forward.promise.fulfilled()
    assert torch.equal(device.down(more), x + 1)
    assert forward.runs == 0


def test_what_a_promise_reads_is_not_overwritten_first(device: Device) -> None:
    x = torch.randn(4, 6)
    a = device.up(x)
    forward = Forward(device, a)
    device.launch("aten.add_.Scalar", (device.new(3), 1))
    assert forward.runs == 0
    device.launch("aten.zero_", (a,))
    assert forward.runs == 1
    assert torch.equal(device.down(forward.out), 2 * x)
    forward = Forward(device, a)
    device.accelerator.fill(a, 5.0)
    assert forward.runs == 1
    assert torch.equal(device.down(forward.out), torch.zeros(4, 6))


def test_a_second_promise_forces_the_first(device: Device) -> None:
    first = Forward(device, device.up(torch.ones(4, 6)))
    second = Forward(device, device.up(torch.ones(4, 6)))
    assert (first.runs, second.runs) == (1, 0)
    device.accelerator.synchronize()
    assert second.runs == 1


def test_results_that_nobody_holds_end_while_promised(device: Device) -> None:
    forward = Forward(device, device.up(torch.ones(4, 6)))
    assert forward.promise.writes() == [forward.out]
    promise = forward.promise
    del forward.out
    assert promise.writes() == []
    promise.fulfilled()


def test_many_different_slices_are_forgotten_again(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moaic.runtime.controller.eager_ops.MOST_PREPARED", 8)
    x = torch.randn(4, 6)
    a = device.up(x, ROWS)
    for row in range(4):
        for column in range(6):
            device.launch("aten.mul_.Scalar", (View(a, (), (), 6 * row + column, torch.float32), row - column))
    factors = torch.tensor([[row - column for column in range(6)] for row in range(4)])
    assert torch.equal(device.down(a), x * factors)


class Reader:
    """A forward whose backward reads a buffer."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer

    def reads(self, buffer: Buffer) -> bool:
        return buffer is self.buffer

    def replace(self, buffer: Buffer, copy: Buffer) -> None:
        self.buffer = copy


def test_a_buffer_is_copied_before_a_write_for_as_long_as_its_reader_exists(device: Device) -> None:
    buffer = device.up(torch.ones(4, 6))
    reader, gone = Reader(buffer), Reader(buffer)
    device.accelerator.keep(reader)
    device.accelerator.keep(gone)
    copies = weakref.WeakSet[Buffer]()
    del gone
    device.launch("aten.add_.Scalar", (buffer, 1))
    copies.add(reader.buffer)
    assert torch.equal(device.down(reader.buffer), torch.ones(4, 6))
    assert torch.equal(device.down(buffer), torch.full((4, 6), 2.0))
    del reader
    assert not copies


def test_a_forward_that_has_run_refers_to_nothing_of_its_call(device: Device) -> None:
    """A call refers to its deferred forward: with a circle it would last until the next garbage collection."""
    call = Reader(device.new(4, 6))
    reference = weakref.ref(call)
    forward = DeferredForward(partial(call.replace, call.buffer, call.buffer), [], [])
    device.accelerator.promise(forward)
    del call
    assert reference() is not None
    forward.force()
    assert reference() is None
