"""Take softmaxes apart along dims that an axis can split, so that nobody needs such a dim whole.

The largest element is found in as many parts as the axis has ranks, and then among the parts; sums of exponentials are
sums. What travels is one number per rank and row, however long the rows are: logits over a split vocabulary stay where
they are made. Legal for any value: `softmax(x) = exp(x - max) / sum(exp(x - max))`, in float32 where `x` is narrower.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from moaic.ir.emit import Emitter
from moaic.ir.graph import Function, Module, Op, Value
from moaic.ir.ops import attr_ints
from moaic.ir.types import TensorType
from moaic.passes.annotate import Axis
from moaic.passes.solver_states import Possible

NARROW = frozenset({"f16", "bf16"})

Find = Callable[[Module, Axis], Possible]
"""What an axis may do to a module."""


def take_apart(module: Module, axis: Axis, find: Find) -> tuple[Module, Possible]:
    """`module` with every softmax whose dim the axis could split taken apart, and what the axis may do to it then."""
    found = find(module, axis)
    functions = tuple(_function(function, axis, found) for function in module.functions)
    if all(new is old for new, old in zip(functions, module.functions, strict=True)):
        return module, found
    module = Module(functions, module.mesh)
    return module, find(module, axis)


def _function(function: Function, axis: Axis, found: Possible) -> Function:
    if not any(_splits(op, axis, found) for op in function.ops):
        return function
    ops = (each for op in function.ops for each in (_apart(op, axis) if _splits(op, axis, found) else (op,)))
    return replace(function, ops=tuple(ops))


def _splits(op: Op, axis: Axis, found: Possible) -> bool:
    """Whether the axis, and no other one, could split the dim."""
    if op.name not in _MAKERS:
        return False
    (x,), dim = op.inputs(), _dim(op)
    if dim is None or x.type.layout.on_dim(dim):
        return False
    return (dim, x.type.shape[dim] // axis.size) in found.splits.get(x, ())


def _dim(op: Op) -> int | None:
    """The one dim that the op reduces, from the front; None where there are several."""
    rank = len(next(op.inputs()).type.shape)
    dims = attr_ints(op, "dim")
    return dims[0] % rank if len(dims) == 1 and rank else None


@dataclass(slots=True)
class _Work(Emitter):
    old: Op
    dim: int
    parts: int

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
        """The largest element along the dim, kept as a dim of size one: of each part, then of all."""
        kind, size = x.type, x.type.shape[self.dim]
        seen_as = _with_sizes(kind, self.dim, self.parts, size // self.parts)
        seen = self.emit("aten.view", [x], seen_as, size=seen_as.shape)
        each = self.emit(name, [seen], _with_sizes(kind, self.dim, self.parts), dim=(self.dim + 1,), keepdim=False)
        return self.emit(name, [each], _with_sizes(kind, self.dim, 1), dim=(self.dim,), keepdim=True)

    def total(self, x: Value) -> Value:
        kind = _with_sizes(x.type, self.dim, 1)
        return self.emit("aten.sum.dim_IntList", [x], kind, dim=(self.dim,), keepdim=True)

    def kept(self, value: Value) -> Value:
        """`value` without the reduced dim, unless the op keeps it."""
        kind = replace(self.old.results[0].type, dtype=value.type.dtype)
        return value if value.type == kind else self.emit("aten.view", [value], kind, size=kind.shape)


def _with_sizes(kind: TensorType, dim: int, *sizes: int) -> TensorType:
    """The type with dims of these sizes in the place of one that nothing splits."""
    more = len(sizes) - 1
    splits = (replace(split, dim=split.dim + more) if split.dim > dim else split for split in kind.layout.splits)
    shape = (*kind.shape[:dim], *sizes, *kind.shape[dim + 1 :])
    return TensorType(kind.dtype, shape, replace(kind.layout, splits=tuple(splits)))


def _apart(op: Op, axis: Axis) -> Sequence[Op]:
    dim = _dim(op)
    assert dim is not None
    work = _Work(op, dim, axis.size, loc=op.loc)
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
    "aten.amax": _extreme,
    "aten.amin": _extreme,
}
