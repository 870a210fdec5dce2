"""The command log: replayed into fresh workers it gives the same bits."""

from __future__ import annotations

import pytest
import torch

from moaic.runtime.controller.accelerator import Accelerator
from moaic.runtime.controller.buffer import whole
from moaic.runtime.controller.command_log import Log, replay
from moaic.runtime.controller.launch import launch
from moaic.runtime.protocol.commands import CODES, Free, Run

PROGRAM = """// moai 1
mesh [dp=2]
func @step(%x: f32[64{dp}, 32], %w: f32[32, 32], %k: i64[2]) -> (f32[32, 32] +dp, f32[64{dp}, 32]) {
  %y = aten.mm %x, %w : f32[64{dp}, 32]
  %r = moai.rand %k : f32[64{dp}, 32]
  %d = aten.mul.Tensor %y, %r : f32[64{dp}, 32]
  %t = aten.permute %x {dims = [1, 0]} : f32[32, 64{dp}]
  %g = aten.mm %t, %d : f32[32, 32] +dp
  return %g, %d
}
func @main(%x: f32[64{dp}, 32], %w: f32[32, 32], %k: i64[2] key) -> (f32[32{dp}, 32], f32[64{dp}, 32]) {
  %g, %d = call @step %x, %w, %k : f32[32, 32] +dp, f32[64{dp}, 32]
  %s = moai.reduce_scatter %g {axis = "dp"} : f32[32{dp}, 32]
  return %s, %d
}
"""


@pytest.mark.timeout(120)
def test_a_replayed_log_gives_equal_bits() -> None:
    device = Accelerator(launch(2), record=True)
    try:
        kept = _train(device)
        expected = device.contents()
        log = device.log()
        del kept
    finally:
        device.close()
    assert Log.decoded(log.encoded()) == log
    sequences = [entry.sequence for entry in log.entries]
    assert sequences == sorted(set(sequences))
    fresh = Accelerator(launch(log.workers))
    try:
        replay(log, fresh.send)
        assert fresh.contents() == expected
        assert len(expected[0]) > 3
    finally:
        fresh.close()


def _train(device: Accelerator) -> list[object]:
    torch.manual_seed(0)
    w, m = device.buffer("f32", (32, 32)), device.buffer("f32", (32, 32))
    device.upload(w, torch.randn(32, 32))
    device.fill(m, 0.0)
    program = device.load(PROGRAM)
    outputs = []
    for step in range(4):
        x, g, d = (device.buffer("f32", shape) for shape in ((64, 32), (32, 32), (64, 32)))
        device.upload(x, torch.randn(64, 32))
        device.run(program, [x, w], [g, d], key=(5, step))
        device.launch("aten._foreach_lerp_.Scalar", ([whole(m)], [whole(g)], 0.1), {}, ())
        device.launch("aten._foreach_add_.List", ([whole(w)], [whole(m)]), {"alpha": -0.01}, ())
        outputs.append(d)
        device.download(whole(g))
    return [w, m, *outputs]


@pytest.mark.timeout(120)
def test_what_nobody_holds_makes_room_for_the_next_run() -> None:
    device = Accelerator(launch(2), record=True)
    try:
        x, w = (device.buffer("f32", shape) for shape in ((64, 32), (32, 32)))
        for buffer in (x, w):
            device.fill(buffer, 1.0)
        program = device.load(PROGRAM)
        for step in range(3):
            results = [device.buffer("f32", shape) for shape in ((32, 32), (64, 32))]
            device.run(program, [x, w], results, key=(5, step))
            del results
        codes = [command[0] for entry in device.log().entries for command in entry.commands]
    finally:
        device.close()
    both = [CODES[Run], CODES[Free]]
    assert [code for code in codes if code in both] == both * 3


def test_what_is_not_recorded_has_no_log(two: Accelerator) -> None:
    with pytest.raises(ValueError, match="does not record"):
        two.log()
