"""Rewrites of reads and writes by index into ops whose rules can shard the dims of the index, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Final

from moaic.capture.fx.op_call import OpCall, Rewrite, each_of, expanded, viewed
from moaic.ir.graph import Attr, Value
from moaic.ir.types import FLOATING, TensorType


def _index(call: OpCall) -> Value:
    """`x[arange(rows), columns]` as a gather, which can be sharded along the rows; any other index stays.

    %r = aten.arange.start_step {start = 0, end = 4}      // %x: f32[4, 9]
    %v = aten.index.Tensor %x, [%r, %columns]             %v = aten.gather %x, %columns2 {dim = 1}
    """
    base, indices = call.operands
    assert isinstance(base, Value)
    assert isinstance(indices, tuple)
    columns = _column_of_each_row(call, base, indices)
    if columns is None:
        return call.emit_as("aten.index.Tensor", call.operands, call.attrs)
    type_ = TensorType(base.type.dtype, columns.type.shape)
    return viewed(call, call.emit("aten.gather", base, columns, type_=type_, dim=1), call.type.shape)


def _column_of_each_row(call: OpCall, base: Value, indices: Sequence[Value | None]) -> Value | None:
    """The columns of `x[arange(rows), columns]`, in the shape that `gather` takes; None for any other index."""
    if len(indices) != 2 or len(base.type.shape) < 2:
        return None
    rows, columns = indices
    count, length, *inner = base.type.shape
    per_row = TensorType("i64", (count,))
    if rows is None or columns is None or not rows.type == columns.type == per_row or not _is_arange(call, rows):
        return None
    narrow = viewed(call, _from_zero(call, columns, length), (count, 1, *(1 for _ in inner)))
    return expanded(call, narrow, (count, 1, *inner))


def _is_arange(call: OpCall, numbers: Value) -> bool:
    """Whether the numbers are 0, 1, 2 and so on."""
    op = call.builder.producers.get(numbers)
    if op is None or op.name != "aten.arange.start_step":
        return False
    return not op.attrs.get("start") and op.attrs.get("step", 1) == 1


def _from_zero(call: OpCall, index: Value, count: int) -> Value:
    """An index without negative numbers, which count from the end of `count` elements."""
    below = call.emit("aten.lt.Scalar", index, type_=TensorType("bool", index.type.shape), other=0)
    wrapped = call.emit("aten.add.Tensor", index, None, type_=index.type, other=count)
    return call.emit("aten.where.self", below, wrapped, index, type_=index.type)


def _index_put(call: OpCall) -> Value:
    """The gradient of a look-up of rows as that of an embedding, whose rule shards the look-ups, too.

    %z = aten.full {fill_value = 0.0}
    %g = aten.index_put %z, [%rows], %values {accumulate = true}
    %g = aten.embedding_dense_backward %values, %rows
    """
    base, indices, values = call.operands
    assert isinstance(base, Value)
    assert isinstance(indices, tuple)
    assert isinstance(values, Value)
    adds_to_zeros = call.attrs.get("accumulate") and _is_zero(call, base)
    if adds_to_zeros and (columns := _column_of_each_row(call, base, indices)) is not None:
        one_per_row = (base.type.shape[0], *base.type.shape[2:])
        source = viewed(call, expanded(call, values, one_per_row), columns.type.shape)
        return call.emit_as("aten.scatter_add", [base, columns, source], {"dim": 1})
    rows = indices[0]
    is_lookup = len(indices) == 1 and rows is not None and rows.type.dtype == "i64"
    if not (adds_to_zeros and is_lookup and base.type.dtype in FLOATING):
        return call.emit_as("aten.index_put", call.operands, call.attrs)
    assert rows is not None
    count, *inner = base.type.shape
    values = expanded(call, values, (*rows.type.shape, *inner))
    table = TensorType(base.type.dtype, (count, prod(inner)))
    return _summed_by_row(call, values, _from_zero(call, rows, count), table, base.type.shape)


def _scatter_add(call: OpCall) -> Value:
    """Sums by index into zeros as an embedding's gradient, whose rule shards the summed values, too."""
    base, index, source = call.operands
    assert isinstance(base, Value)
    assert isinstance(index, Value)
    assert isinstance(source, Value)
    is_plain = len(base.type.shape) == 1 and index.type.shape == source.type.shape and base.type.dtype in FLOATING
    if not (_is_zero(call, base) and is_plain):
        return call.emit_as("aten.scatter_add", call.operands, call.attrs)
    return _summed_by_row(call, source, index, TensorType(base.type.dtype, (base.type.shape[0], 1)), base.type.shape)


def _is_zero(call: OpCall, value: Value) -> bool:
    op = call.builder.producers.get(value)
    return op is not None and op.name == "aten.full" and not op.attrs["fill_value"]


def _summed_by_row(call: OpCall, values: Value, rows: Value, table: TensorType, shape: tuple[int, ...]) -> Value:
    """For each row of `table` the sum of the values whose index names it, in `shape`."""
    flat = (*rows.type.shape, table.shape[1])
    grad = call.emit("aten.view", values, type_=TensorType(values.type.dtype, flat), size=flat)
    attrs: dict[str, Attr] = {"num_weights": table.shape[0], "padding_idx": -1, "scale_grad_by_freq": False}
    summed = call.emit("aten.embedding_dense_backward", grad, rows, type_=table, **attrs)
    return call.emit("aten.view", summed, size=shape)


INDEX_REWRITES: Final[Mapping[str, Rewrite]] = {
    **each_of("aten.index.Tensor aten._unsafe_index.Tensor", _index),
    **each_of("aten.index_put aten._unsafe_index_put", _index_put),
    "aten.scatter_add": _scatter_add,
}
