"""Values of their own on which programs run when they are timed."""

from __future__ import annotations

from math import prod
from typing import Final

from moaic.ir.layout import Mesh
from moaic.ir.types import FLOAT8, FLOATING
from moaic.runtime.controller.accelerator import Accelerator
from moaic.runtime.controller.buffer import Buffer

BLOCK: Final = 1 << 22
"""Random numbers that are drawn for a buffer; a larger one repeats them."""

KEY: Final = (0, 0)
"""Of random ops."""

CONSTANT: Final = 0.5


def inputs_of(accelerator: Accelerator, number: int, integer: int = 0) -> list[Buffer]:
    """Buffers of a constant value for the parameters of a loaded program, its random key left out."""
    buffers = _unfilled(accelerator, number)
    for buffer in buffers:
        accelerator.fill(buffer, CONSTANT if _is_float(buffer) else integer)
    return buffers


def kernel_inputs_of(accelerator: Accelerator, number: int) -> list[Buffer]:
    """The same for a program that every worker runs whole, with random floats on GPUs.

    An H100 multiplies constants, of which few bits change, 1.13 times as fast in float16.
    """
    if not accelerator.has_gpus:
        return inputs_of(accelerator, number)
    buffers, drawings = _unfilled(accelerator, number), dict[str, int]()
    for buffer in buffers:
        if not _is_float(buffer) or not prod(buffer.shape):
            accelerator.fill(buffer, 0)
            continue
        text = _drawing(buffer, accelerator.flavor)
        if text not in drawings:
            drawings[text] = accelerator.load(text, compiled=False)
        accelerator.run(drawings[text], [], [buffer], KEY)
    return buffers


def _unfilled(accelerator: Accelerator, number: int) -> list[Buffer]:
    main = accelerator.program(number)
    given = [param for index, param in enumerate(main.params) if main.param_role(index).kind != "key"]
    return [accelerator.buffer(param.type.dtype, param.type.shape) for param in given]


def _is_float(buffer: Buffer) -> bool:
    return buffer.dtype in FLOATING | FLOAT8


def _drawing(buffer: Buffer, workers: int) -> str:
    """A program that draws numbers between -1/2 and 1/2."""
    kind, shape, count = buffer.dtype, list(buffer.shape), prod(buffer.shape)
    block = min(BLOCK, count)
    copies = -(-count // block)
    return f"""// moai 1
mesh {Mesh((("w", workers),))}
func @values(%key: i64[2]) -> ({kind}{shape}) {{
  %0 = moai.rand %key : f32[{block}]
  %1 = aten.sub.Scalar %0 {{other = 0.5}} : f32[{block}]
  %2 = aten._to_copy %1 {{dtype = "{kind}"}} : {kind}[{block}]
  %3 = aten.expand %2 {{size = [{copies}, {block}]}} : {kind}[{copies}, {block}]
  %4 = aten.clone %3 : {kind}[{copies}, {block}]
  %5 = aten.view %4 {{size = [{copies * block}]}} : {kind}[{copies * block}]
  %6 = aten.slice.Tensor %5 {{dim = 0, start = 0, end = {count}}} : {kind}[{count}]
  %7 = aten.view %6 {{size = {shape}}} : {kind}{shape}
  return %7
}}
func @main(%key: i64[2] key) -> ({kind}{shape}) {{
  %0 = call @values %key : {kind}{shape}
  return %0
}}
"""
