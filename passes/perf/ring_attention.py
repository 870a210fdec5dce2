"""What a ring asks of each rank: bytes that it passes on, its work, and the memory that this takes.

Turn by turn, with a block each: the keys and values at hand are attended to while they go on to the next rank and
others come. In the backward the gradients of a block follow it one turn later, added up in float32 where they are
narrower, and at last go home.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from moaic.ir.attention import is_causal, mask_of, query_key_value
from moaic.ir.graph import Op, Value
from moaic.ir.layout import Mesh
from moaic.ir.ring_attention import attention_of, is_striped
from moaic.ir.types import DTYPE_BYTES, TensorType
from moaic.passes.perf.fusion import FusedKernel, nbytes

MERGED = 3
"""Times that adding what a turn gives to what was before reads or writes it."""


def handed_on(block: Sequence[float], gradients: Sequence[float], ranks: int) -> list[float]:
    """Bytes of all that each rank passes on: blocks, and in a backward their gradients, which have one way more."""
    return [*block] * (ranks - 1) + [*gradients] * ranks


def block_bytes(op: Op, mesh: Mesh) -> list[int]:
    """Bytes of the keys and of the values of attention that one rank holds."""
    _, *keys_and_values = query_key_value(op)
    return [value.type.local_nbytes(mesh) for value in keys_and_values]


def gradient_bytes(op: Op, mesh: Mesh) -> list[int]:
    """Bytes of their gradients while these are added up; none in a forward."""
    return [_wide_bytes(value.type, mesh) for value in op.results[1:]] if len(op.results) == 3 else []


def merged_bytes(op: Op, mesh: Mesh, ranks: int) -> int:
    """Bytes that a rank reads and writes in a ring to add up what the turns give."""
    return MERGED * (ranks - 1) * sum(_wide_bytes(value.type, mesh) for value in op.results)


def handed_on_in(op: Op, mesh: Mesh) -> list[float]:
    """Bytes of all that each rank passes on in a ring."""
    return handed_on(block_bytes(op, mesh), gradient_bytes(op, mesh), ranks_of(op, mesh))


def turns(op: Op, mesh: Mesh) -> list[FusedKernel]:
    """What the rank does that has most to do, turn by turn."""
    return [_turn(op, mesh, is_causal(op) and (turn == 0 or is_striped(op))) for turn in range(ranks_of(op, mesh))]


def transient(op: Op, mesh: Mesh) -> int:
    """Most bytes that a rank holds at once beside the operands, the results among them.

    A block at hand that is not its own and one that comes. In a forward the sum so far, what a turn gives, and that
    weighted. In a backward both of the query's gradient, and of a block's gradients those that go, come and are made.
    """
    blocks = min(2, ranks_of(op, mesh) - 1) * sum(block_bytes(op, mesh))
    first, gradients = _wide_bytes(op.results[0].type, mesh), sum(gradient_bytes(op, mesh))
    return blocks + (2 * first + 3 * gradients if gradients else 3 * first)


def ranks_of(op: Op, mesh: Mesh) -> int:
    return mesh.size(str(op.attrs["axis"]))


def _turn(op: Op, mesh: Mesh, causal: bool) -> FusedKernel:
    """Attention of the rows here over one block of keys; of a mask a block's columns are read."""
    local = {value: Value(value.type.local(mesh), value.name) for value in (*op.inputs(), *op.results)}
    attention = attention_of(op).with_operands(local)
    results = tuple(local[value] for value in op.results)
    block = replace(attention, results=results, attrs={**attention.attrs, "is_causal": causal})
    reads = {value: nbytes(value) for value in block.inputs()}
    if mask := mask_of(block):
        reads[mask] //= ranks_of(op, mesh)
    return FusedKernel((block,), reads, results)


def _wide_bytes(tensor: TensorType, mesh: Mesh) -> int:
    """Bytes of one rank's part of a value while it is added up."""
    return prod(tensor.local_shape(mesh)) * max(DTYPE_BYTES[tensor.dtype], DTYPE_BYTES["f32"])
