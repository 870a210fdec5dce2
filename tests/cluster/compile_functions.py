"""A program for tests: two functions, run op by op until they are compiled in the background, or compiled beforehand.

Its arguments are the mesh, the places of the two functions, and `background` or `beforehand`, or `never`.
"""

from __future__ import annotations

import sys
import time

import torch

from moaic.runtime.controller.accelerator import Accelerator
from moaic.runtime.controller.buffer import whole
from moaic.runtime.controller.session import accelerator

TEXT = """// moai 1
mesh [{mesh}]
func @double(%x: f32[8, 16]{first}) -> (f32[8, 16]{first}) {{
  %y = aten.add.Tensor %x, %x : f32[8, 16]{first}
  return %y
}}
func @square(%x: f32[8, 16]{second}) -> (f32[8, 16]{second}) {{
  %y = aten.mul.Tensor %x, %x : f32[8, 16]{second}
  %z = aten.tanh %y : f32[8, 16]{second}
  return %z
}}
func @main(%x: f32[8, 16]{first} input "x") -> (f32[8, 16]{second}) {{
  %y = call @double %x : f32[8, 16]{first}
{send}  %w = call @square %{sent} : f32[8, 16]{second}
  return %w
}}
"""

SEND = '  %z = moai.send %y {axis = "pp"} : f32[8, 16] on pp=1\n'


def text(mesh: str) -> str:
    """The functions on all ranks; the second stage of a pipeline has the second one."""
    if mesh == "pp=2":
        return TEXT.format(mesh=mesh, first=" on pp=0", second=" on pp=1", send=SEND, sent="z")
    return TEXT.format(mesh=mesh, first="", second="", send="", sent="y")


def run(device: Accelerator, program: int, *, op_by_op: bool) -> None:
    x, result = (device.buffer("f32", (8, 16)) for _ in range(2))
    device.upload(x, torch.full((8, 16), 0.25))
    device.run(program, [x], [result], op_by_op=op_by_op)
    assert torch.allclose(device.download(whole(result)), torch.full((8, 16), 0.25).tanh())


def main(mesh: str, when: str) -> None:
    device, background = accelerator(), when == "background"
    program = device.load(text(mesh), compiled=when != "never", background=background)
    run(device, program, op_by_op=background)
    while not device.are_compiled([program]):
        # How far workers of other hosts are is known by their messages.
        device.synchronize()
        time.sleep(0.02)
    run(device, program, op_by_op=False)
    # What the last of the workers says, beside its results, is read and logged.
    device.synchronize()


if __name__ == "__main__":
    main(*sys.argv[1:])
