"""Costs of ring attention on each rank: bytes sent, compute and memory.

In every turn a rank computes attention over one block of keys and values while it sends that block to the next rank and
receives another. In the backward the gradients of a block follow it one turn later, accumulated in float32 if narrower,
and return to the rank that owns the block.
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
"""Reads and writes of each byte when the result of a turn is merged into the sum so far."""


def handed_on(block: Sequence[float], gradients: Sequence[float], ranks: int) -> list[float]:
    """Bytes of each message of a rank: blocks, and in a backward their gradients, which take one more turn."""
    return [*block] * (ranks - 1) + [*gradients] * ranks


def block_bytes(op: Op, mesh: Mesh) -> list[int]:
    """Bytes of the keys and of the values of attention that one rank holds."""
    _, *keys_and_values = query_key_value(op)
    return [value.type.local_nbytes(mesh) for value in keys_and_values]


def gradient_bytes(op: Op, mesh: Mesh) -> list[int]:
    """Bytes of the gradients of keys and of values while they are accumulated; none in a forward."""
    return [_wide_bytes(value.type, mesh) for value in op.results[1:]] if len(op.results) == 3 else []


def merged_bytes(op: Op, mesh: Mesh, ranks: int) -> int:
    """Bytes that a rank reads and writes to merge the results of the turns."""
    return MERGED * (ranks - 1) * sum(_wide_bytes(value.type, mesh) for value in op.results)


def handed_on_in(op: Op, mesh: Mesh) -> list[float]:
    """Bytes of each message of a rank in a ring."""
    return handed_on(block_bytes(op, mesh), gradient_bytes(op, mesh), ranks_of(op, mesh))


def turns(op: Op, mesh: Mesh) -> list[FusedKernel]:
    """The kernel of each turn on the rank with most work."""
    return [_turn(op, mesh, is_causal(op) and (turn == 0 or is_striped(op))) for turn in range(ranks_of(op, mesh))]


def transient(op: Op, mesh: Mesh) -> int:
    """Peak bytes of a rank without the operands, results included.

    The block of this turn if it is not the rank's own, and the block that arrives. In a forward the sum so far, the
    result of a turn, and that result weighted. In a backward the two of the query's gradient, and the gradients of a
    block that are sent, received and computed.
    """
    blocks = min(2, ranks_of(op, mesh) - 1) * sum(block_bytes(op, mesh))
    first, gradients = _wide_bytes(op.results[0].type, mesh), sum(gradient_bytes(op, mesh))
    return blocks + (2 * first + 3 * gradients if gradients else 3 * first)


def ranks_of(op: Op, mesh: Mesh) -> int:
    return mesh.size(str(op.attrs["axis"]))


def _turn(op: Op, mesh: Mesh, causal: bool) -> FusedKernel:
    """Attention of a rank's rows over one block of keys; only that block's columns of a mask are read."""
    local = {value: Value(value.type.local(mesh), value.name) for value in (*op.inputs(), *op.results)}
    attention = attention_of(op).with_operands(local)
    results = tuple(local[value] for value in op.results)
    block = replace(attention, results=results, attrs={**attention.attrs, "is_causal": causal})
    reads = {value: nbytes(value) for value in block.inputs()}
    if mask := mask_of(block):
        reads[mask] //= ranks_of(op, mesh)
    return FusedKernel((block,), reads, results)


def _wide_bytes(tensor: TensorType, mesh: Mesh) -> int:
    """Bytes of a rank's shard of a value while it is accumulated."""
    return prod(tensor.local_shape(mesh)) * max(DTYPE_BYTES[tensor.dtype], DTYPE_BYTES["f32"])
