"""Take softmaxes and extremes apart along dims that an axis can split, so that nobody needs such a dim whole.

The largest element is found in as many parts as the axis has ranks, and then among the parts; sums of exponentials are
sums. What travels is one number per rank and row, however long the rows are: logits over a split vocabulary stay where
they are made. Legal for any value: `softmax(x) = exp(x - max) / sum(exp(x - max))`, in float32 where `x` is narrower.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from moaic.ir.builder import OpBuilder
from moaic.ir.graph import Function, Module, Op, Value
from moaic.ir.layout import Sharded
from moaic.ir.ops import reduced_dims
from moaic.ir.types import TensorType
from moaic.passes.sharding.partitioner import Axis
from moaic.passes.sharding.solver.strategy_sets import StrategySets

NARROW = frozenset({"f16", "bf16"})

_EXTREMES = ("aten.amax", "aten.amin")

Find = Callable[[Module, Axis], StrategySets]
"""What an axis may do to a module."""


def take_apart(module: Module, axis: Axis, find: Find) -> tuple[Module, StrategySets]:
    """`module` with every softmax whose dim the axis could split taken apart, and what the axis may do to it then."""
    found = find(module, axis)
    functions = tuple(_function(function, axis, found) for function in module.functions)
    if all(new is old for new, old in zip(functions, module.functions, strict=True)):
        return module, found
    module = Module(functions, module.mesh)
    return module, find(module, axis)


def extremes_apart(module: Module, axis: Axis, find: Find) -> Module:
    """`module` with all softmaxes and extremes taken apart, if it has any extremes."""
    has_any = any(op.name in _EXTREMES for function in module.functions for op in function.ops)
    return take_apart(module, axis, find)[0] if has_any else module


def _function(function: Function, axis: Axis, found: StrategySets) -> Function:
    cuts = {op: cut for op in function.ops if op.name in _MAKERS and (cut := _cut(op, axis, found))}
    if not cuts:
        return function
    ops = (each for op in function.ops for each in (_apart(op, axis, cuts[op]) if op in cuts else (op,)))
    return replace(function, ops=tuple(ops))


DimStrides = Mapping[int, int]
"""For dims that an op reduces, the stride of the digit that an axis could take."""


def _cut(op: Op, axis: Axis, found: StrategySets) -> DimStrides:
    """Where the axis, and no other one, could split the dims that the op reduces: contiguously if it can."""
    (x,) = op.inputs()
    dims = reduced_dims(op)
    if any(x.type.layout.on_dim(dim) for dim in dims) or (len(dims) != 1 and op.name not in _EXTREMES):
        return {}
    digits = sorted(state for state in found.splits.get(x, ()) if isinstance(state, Sharded) and state.dim in dims)
    return {dim: stride for dim, stride in digits if stride * axis.size == x.type.shape[dim] or op.name in _EXTREMES}


@dataclass(slots=True)
class _Work(OpBuilder):
    old: Op
    cut: DimStrides
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
        if x.type.dtype not in NARROW:
            return x
        return self.emit("aten._to_copy", [x], replace(x.type, dtype="f32"), dtype="f32")

    def largest(self, x: Value, name: str = "aten.amax") -> Value:
        """The largest element along the dims, kept as dims of size one: of each part, then of all."""
        seen, each, last = x.type, x.type, x.type
        inner: list[int] = []
        for dim in sorted(self.dims, reverse=True):
            sizes, part = self._digits(dim, x.type.shape[dim])
            inner = [dim + i for i in range(len(sizes)) if i != part] + [at + len(sizes) - 1 for at in inner]
            seen, each, last = (
                _with_sizes(seen, dim, *sizes),
                _with_sizes(each, dim, sizes[part]),
                _with_sizes(last, dim, 1),
            )
        parts = self.emit("aten.view", [x], seen, size=seen.shape)
        found = self.emit(name, [parts], each, dim=tuple(inner), keepdim=False)
        return self.emit(name, [found], last, dim=tuple(sorted(self.dims)), keepdim=True)

    def _digits(self, dim: int, size: int) -> tuple[tuple[int, ...], int]:
        """The sizes that a dim is seen as, and which of them counts the parts."""
        if dim not in self.cut:
            return (1, size), 0
        stride = self.cut[dim]
        outer = size // (stride * self.ranks)
        return ((self.ranks, stride), 0) if outer == 1 else ((outer, self.ranks, stride), 1)

    def total(self, x: Value) -> Value:
        (dim,) = self.dims
        return self.emit("aten.sum.dim_IntList", [x], _with_sizes(x.type, dim, 1), dim=(dim,), keepdim=True)

    def kept(self, value: Value) -> Value:
        """`value` without the reduced dims, unless the op keeps them."""
        kind = replace(self.old.results[0].type, dtype=value.type.dtype)
        return value if value.type == kind else self.emit("aten.view", [value], kind, size=kind.shape)


def _with_sizes(kind: TensorType, dim: int, *sizes: int) -> TensorType:
    """The type with dims of these sizes in the place of one that nothing splits."""
    more = len(sizes) - 1
    splits = (replace(split, dim=split.dim + more) if split.dim > dim else split for split in kind.layout.splits)
    shape = (*kind.shape[:dim], *sizes, *kind.shape[dim + 1 :])
    return TensorType(kind.dtype, shape, replace(kind.layout, splits=tuple(splits)))


def _apart(op: Op, axis: Axis, cut: DimStrides) -> Sequence[Op]:
    work = _Work(op, cut, axis.size, loc=op.loc)
    return work.finish(_MAKERS[op.name](work))


def _softmax(work: _Work) -> Value:
    x = work.wide()
    weights = work.like("aten.exp", work.like("aten.sub.Tensor", x, work.largest(x)))
    return work.like("aten.div.Tensor", weights, work.total(weights))


def _log_softmax(work: _Work) -> Value:
    x = work.wide()
    shifted = work.like("aten.sub.Tensor", x, work.largest(x))
    total = work.total(work.like("aten.exp", shifted))
    return work.like("aten.sub.Tensor", shifted, work.like("aten.log", total))


def _logsumexp(work: _Work) -> Value:
    """Rows whose largest element is infinite are not shifted: infinity less infinity is no number."""
    x = work.wide()
    largest = work.largest(x)
    infinite = work.emit("aten.isinf", [largest], replace(largest.type, dtype="bool"))
    number = TensorType(x.type.dtype, ())
    zero = work.emit("aten.full", [], number, size=(), fill_value=0.0, dtype=number.dtype)
    shift = work.emit("aten.where.self", [infinite, zero, largest], largest.type)
    total = work.total(work.like("aten.exp", work.like("aten.sub.Tensor", x, shift)))
    return work.kept(work.like("aten.add.Tensor", work.like("aten.log", total), shift))


def _extreme(work: _Work) -> Value:
    (x,) = work.old.inputs()
    return work.kept(work.largest(x, work.old.name))


_MAKERS: Mapping[str, Callable[[_Work], Value]] = {
    "aten._softmax": _softmax,
    "aten._log_softmax": _log_softmax,
    "aten.logsumexp": _logsumexp,
    **dict.fromkeys(_EXTREMES, _extreme),
}
