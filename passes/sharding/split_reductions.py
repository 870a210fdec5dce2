"""Decompose softmaxes and extremes along dims that an axis can shard, so that no op needs such a dim replicated.

The largest element is taken in as many parts as the axis has ranks, and then among the parts; sums of exponentials are
sums. Each rank sends one number per row, however long the rows are: logits over a sharded vocabulary stay where they
are made. Legal for any value: `softmax(x) = exp(x - max) / sum(exp(x - max))`, in float32 where `x` is narrower.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from moaic.ir.builder import OpBuilder
from moaic.ir.graph import Function, Module, Op, Value
from moaic.ir.layout import Sharded
from moaic.ir.ops import reduced_dims
from moaic.ir.types import HALF, TensorType
from moaic.passes.sharding.axis import Axis
from moaic.passes.sharding.solver.strategy_sets import StrategySets

_EXTREMES = ("aten.amax", "aten.amin")

FindStrategies = Callable[[Module, Axis], StrategySets]
"""The states and strategies that an axis allows in a module."""


def decompose(module: Module, axis: Axis, find: FindStrategies) -> tuple[Module, StrategySets]:
    """`module` with every softmax decomposed whose dim the axis could shard, and the strategies of the result."""
    sets = find(module, axis)
    functions = tuple(_function(function, axis, sets) for function in module.functions)
    if all(new is old for new, old in zip(functions, module.functions, strict=True)):
        return module, sets
    module = Module(functions, module.mesh)
    return module, find(module, axis)


def decompose_extremes(module: Module, axis: Axis, find: FindStrategies) -> Module:
    """`module` with all softmaxes and extremes decomposed, if it has any extremes."""
    has_any = any(op.name in _EXTREMES for function in module.functions for op in function.ops)
    return decompose(module, axis, find)[0] if has_any else module


def _function(function: Function, axis: Axis, sets: StrategySets) -> Function:
    strides = {op: dims for op in function.ops if op.name in _DECOMPOSE and (dims := _strides(op, axis, sets))}
    if not strides:
        return function
    ops = (new for op in function.ops for new in (_decomposed(op, axis, strides[op]) if op in strides else (op,)))
    return replace(function, ops=tuple(ops))


DimStrides = Mapping[int, int]
"""For dims that an op reduces, the stride of the sub-axis by which the axis could shard it."""


def _strides(op: Op, axis: Axis, sets: StrategySets) -> DimStrides:
    """The shardings by this axis alone of the dims that the op reduces: contiguous ones, and others for extremes."""
    (x,) = op.inputs()
    dims = reduced_dims(op)
    if any(x.type.layout.on_dim(dim) for dim in dims) or (len(dims) != 1 and op.name not in _EXTREMES):
        return {}
    shardings = sorted(state for state in sets.splits.get(x, ()) if isinstance(state, Sharded) and state.dim in dims)
    return {dim: stride for dim, stride in shardings if stride * axis.size == x.type.shape[dim] or op.name in _EXTREMES}


@dataclass(slots=True)
class _Decomposition(OpBuilder):
    """The ops that replace `old`."""

    old: Op
    strides: DimStrides
    ranks: int

    @property
    def dims(self) -> tuple[int, ...]:
        return reduced_dims(self.old)

    def like(self, name: str, x: Value, *others: Value) -> Value:
        """An elementwise op that gives a value of the type of `x`."""
        return self.emit(name, (x, *others), x.type)

    def finish(self, result: Value) -> Sequence[Op]:
        """The ops, of which the last one makes the old result, in its type."""
        (old,) = self.old.results
        if result.type.dtype != old.type.dtype:
            return (*self.ops, Op("aten._to_copy", (result,), (old,), {"dtype": old.type.dtype}, self.old.loc))
        return tuple(replace(op, results=(old,)) if op.results == (result,) else op for op in self.ops)

    def wide(self) -> Value:
        (x,) = self.old.inputs()
        if x.type.dtype not in HALF:
            return x
        return self.emit("aten._to_copy", [x], replace(x.type, dtype="f32"), dtype="f32")

    def largest(self, x: Value, name: str = "aten.amax") -> Value:
        """The largest element along the dims, kept as dims of size one: of each part, then of all.

            %m = aten.amax %x {dim = [1], keepdim = true} : f32[8, 1]           # %x: f32[8, 64], tp=2
        becomes
            %v = aten.view %x {size = [8, 2, 32]} : f32[8, 2, 32]
            %p = aten.amax %v {dim = [2], keepdim = false} : f32[8, 2]          # one number per part
            %m = aten.amax %p {dim = [1], keepdim = true} : f32[8, 1]
        """
        viewed, part_type, last = x.type, x.type, x.type
        inner: list[int] = []
        for dim in sorted(self.dims, reverse=True):
            sizes, part = self._factored(dim, x.type.shape[dim])
            inner = [dim + i for i in range(len(sizes)) if i != part] + [index + len(sizes) - 1 for index in inner]
            viewed, part_type, last = (
                _with_sizes(viewed, dim, *sizes),
                _with_sizes(part_type, dim, sizes[part]),
                _with_sizes(last, dim, 1),
            )
        parts = self.emit("aten.view", [x], viewed, size=viewed.shape)
        of_parts = self.emit(name, [parts], part_type, dim=tuple(inner), keepdim=False)
        return self.emit(name, [of_parts], last, dim=tuple(sorted(self.dims)), keepdim=True)

    def _factored(self, dim: int, size: int) -> tuple[tuple[int, ...], int]:
        """The sizes that a dim is viewed as, and which of them counts the parts."""
        if dim not in self.strides:
            return (1, size), 0
        stride = self.strides[dim]
        outer = size // (stride * self.ranks)
        return ((self.ranks, stride), 0) if outer == 1 else ((outer, self.ranks, stride), 1)

    def total(self, x: Value) -> Value:
        (dim,) = self.dims
        return self.emit("aten.sum.dim_IntList", [x], _with_sizes(x.type, dim, 1), dim=(dim,), keepdim=True)

    def kept(self, value: Value) -> Value:
        """`value` without the reduced dims, unless the op keeps them."""
        wanted = replace(self.old.results[0].type, dtype=value.type.dtype)
        return value if value.type == wanted else self.emit("aten.view", [value], wanted, size=wanted.shape)


def _with_sizes(tensor_type: TensorType, dim: int, *sizes: int) -> TensorType:
    """The type with dims of these sizes in the place of an unsharded one."""
    more = len(sizes) - 1
    splits = (replace(split, dim=split.dim + more) if split.dim > dim else split for split in tensor_type.layout.splits)
    shape = (*tensor_type.shape[:dim], *sizes, *tensor_type.shape[dim + 1 :])
    return TensorType(tensor_type.dtype, shape, replace(tensor_type.layout, splits=tuple(splits)))


def _decomposed(op: Op, axis: Axis, strides: DimStrides) -> Sequence[Op]:
    work = _Decomposition(op, strides, axis.size, loc=op.loc)
    return work.finish(_DECOMPOSE[op.name](work))


def _softmax(work: _Decomposition) -> Value:
    x = work.wide()
    weights = work.like("aten.exp", work.like("aten.sub.Tensor", x, work.largest(x)))
    return work.like("aten.div.Tensor", weights, work.total(weights))


def _log_softmax(work: _Decomposition) -> Value:
    x = work.wide()
    shifted = work.like("aten.sub.Tensor", x, work.largest(x))
    total = work.total(work.like("aten.exp", shifted))
    return work.like("aten.sub.Tensor", shifted, work.like("aten.log", total))


def _logsumexp(work: _Decomposition) -> Value:
    """Rows whose largest element is infinite are not shifted: infinity less infinity is no number."""
    x = work.wide()
    largest = work.largest(x)
    infinite = work.emit("aten.isinf", [largest], replace(largest.type, dtype="bool"))
    number = TensorType(x.type.dtype, ())
    zero = work.emit("aten.full", [], number, size=(), fill_value=0.0, dtype=number.dtype)
    shift = work.emit("aten.where.self", [infinite, zero, largest], largest.type)
    total = work.total(work.like("aten.exp", work.like("aten.sub.Tensor", x, shift)))
    return work.kept(work.like("aten.add.Tensor", work.like("aten.log", total), shift))


def _extreme(work: _Decomposition) -> Value:
    (x,) = work.old.inputs()
    return work.kept(work.largest(x, work.old.name))


_DECOMPOSE: Mapping[str, Callable[[_Decomposition], Value]] = {
    "aten._softmax": _softmax,
    "aten._log_softmax": _log_softmax,
    "aten.logsumexp": _logsumexp,
    **dict.fromkeys(_EXTREMES, _extreme),
}
