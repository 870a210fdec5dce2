"""Two workers with short names for what tests of eager ops do with them, and the places of a buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from moaic.ir.layout import Layout, Mesh, Split
from moaic.runtime.controller.accelerator import Accelerator
from moaic.runtime.controller.buffer import Buffer, View, whole
from moaic.runtime.dtypes import DTYPE_NAMES, DTYPES
from moaic.runtime.protocol.placement import Placement

DP = Mesh((("dp", 2),))
ROWS = Placement(DP, Layout((Split("dp", 0, 2),)))
COLUMNS = Placement(DP, Layout((Split("dp", 1, 3),)))
"""Uneven: 3 of 5 columns, and the other 2."""
WHOLE = Placement(DP)
ALONE = Placement()

PROGRAM = """// moai 1
mesh [{mesh}]
func @main(%x: f32[4{rows}, 5{columns}] input "x") -> (f32[4{rows}, 5{columns}]) {{
  return %x
}}
"""
TEXTS = {
    ROWS: PROGRAM.format(mesh="dp=2", rows="{dp}", columns=""),
    COLUMNS: PROGRAM.format(mesh="dp=2", rows="", columns="{dp:3}"),
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


def view(buffer: Buffer, change: Callable[[Tensor], Tensor]) -> View:
    """The view that `change` makes of a buffer's first tensor."""
    base = torch.empty_strided(buffer.shape, buffer.strides, dtype=DTYPES[buffer.dtype])
    seen = change(base)
    return View(buffer, tuple(seen.shape), seen.stride(), int(seen.storage_offset()), seen.dtype)


PLACES = [None, ROWS, COLUMNS, WHOLE, ALONE]
