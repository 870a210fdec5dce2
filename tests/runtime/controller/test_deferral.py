"""Forwards that run when a value of theirs is read, or with their backward; what they read is kept for them."""

from __future__ import annotations

import weakref
from functools import partial

import torch

from moaic.runtime.controller.buffer import Buffer
from moaic.runtime.controller.deferred_forward import DeferredForward
from tests.runtime.controller.eager_device import ROWS, TEXTS, Device


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
