"""From an annotated function to what one rank runs: local shapes, no layouts, and attributes that fit them.

The same text serves every rank. What differs between ranks, the coordinates that random ops and look-ups need to know
which part they make, comes in as parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from moaic.ir.coordinate_dependent import placed, placed_axes
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Attr, Function, Op, Role, Value
from moaic.ir.layout import Layout, Mesh, Split
from moaic.ir.ops import OPS, Kind, attr_int, kind_of
from moaic.ir.types import TensorType


def localize(function: Function, mesh: Mesh, axes: Collection[str] | None = None) -> Function:
    """`function` as each rank of `mesh` runs it on its parts; with `axes`, its parts over these axes alone.

    Gains one trailing parameter, i64[] with role ("coordinate", axis), per axis whose coordinate an op asks for, in the
    order of the mesh. Raises Diagnostic for an op that cannot make a part.
    """
    gone = [axis for axis, _ in mesh.axes if axes is None or axis in axes]
    coordinates = {axis: Value(TensorType("i64", ()), axis) for axis in _asked_axes(function, gone)}
    local = {value: Value(local_type(value.type, mesh, gone), value.name) for value in function.values()}
    roles = tuple(function.param_role(index) for index in range(len(function.params)))
    more = tuple(Role("coordinate", axis) for axis in coordinates)
    return replace(
        function,
        params=(*(local[value] for value in function.params), *coordinates.values()),
        ops=tuple(each for op in function.ops for each in _local_op(op, local, coordinates, mesh)),
        results=tuple(local[value] for value in function.results),
        param_roles=(*roles, *more) if more else function.param_roles,
    )


def local_type(tensor: TensorType, mesh: Mesh, axes: Collection[str]) -> TensorType:
    """Type of the part that is left when `axes` have taken theirs."""
    shape, layout = list(tensor.shape), tensor.layout
    for axis in axes:
        split = layout.split_of(axis)
        layout = layout.without(axis)
        if split is not None:
            shape[split.dim] //= mesh.size(axis)
            splits = tuple(_within(other, split, mesh) for other in layout.splits)
            layout = Layout(splits, layout.partial, layout.owner)
    return TensorType(tensor.dtype, tuple(shape), layout)


def _within(split: Split, taken: Split, mesh: Mesh) -> Split:
    """`split` as it lies in the part that `taken` leaves."""
    outside = split.dim == taken.dim and split.stride > taken.stride
    return replace(split, stride=split.stride // mesh.size(taken.axis)) if outside else split


def asked_axes(op: Op, axes: Collection[str]) -> set[str]:
    """Those of `axes` whose coordinate the parts of `op` need to know."""
    if op.name == "moai.rand":
        return {split.axis for split in op.results[0].type.layout.splits} & {*axes}
    return placed_axes(op, axes)


def _asked_axes(function: Function, axes: Collection[str]) -> list[str]:
    used = {axis for op in function.ops for axis in asked_axes(op, axes)}
    return [axis for axis in axes if axis in used]


def _local_op(op: Op, local: Mapping[Value, Value], coordinates: Mapping[str, Value], mesh: Mesh) -> list[Op]:
    assert kind_of(op) is not Kind.INSTRUCTION, f"{op.name} is for the worker, not for a compiled function"
    new = replace(op.with_operands(local), results=tuple(local[value] for value in op.results))
    if op.name == "moai.rand":
        return [_rand(op, new, coordinates, mesh)]
    if placed_axes(op, coordinates):
        return placed(op, new, coordinates, mesh)
    known = op.name in OPS or op.name in _REWRITES
    if not known and any(local[value].type.shape != value.type.shape for value in (*op.inputs(), *op.results)):
        raise _cannot_split(op, "it has no rule")
    return [refit(op, new)]


def refit(old: Op, new: Op) -> Op:
    """`new`, whose types are parts of those of `old`, with the attributes that follow from its shapes."""
    return _REWRITES.get(old.name, _as_it_is)(old, new)


def _cannot_split(op: Op, why: str) -> Diagnostic:
    place = f' at "{op.loc.file}":{op.loc.line}' if op.loc.file else ""
    return Diagnostic(f"`{op.name}`{place} cannot make or read a part of a tensor: {why}")


def _rand(old: Op, new: Op, coordinates: Mapping[str, Value], mesh: Mesh) -> Op:
    """Says which elements of the global tensor this is; what the op says of earlier axes stays."""
    tensor = old.results[0].type
    known = old.attrs.get("splits", ())
    assert isinstance(known, tuple)
    taken = [split for split in tensor.layout.splits if split.axis in coordinates]
    splits = (*known, *((split.dim, _stride_before(split, known), mesh.size(split.axis)) for split in taken))
    operands = (*new.operands, *(coordinates[split.axis] for split in taken))
    return replace(new, operands=operands, attrs={"global_shape": tensor.shape, **new.attrs, "splits": splits})


def _stride_before(split: Split, known: Sequence[Attr]) -> int:
    """The stride of `split` in the tensor from which `known` have not yet taken their digits."""
    stride = split.stride
    for dim, taken, ranks in sorted(_triple(each) for each in known):
        if dim == split.dim and stride >= taken:
            stride *= ranks
    return stride


def _triple(split: Attr) -> tuple[int, int, int]:
    assert isinstance(split, tuple)
    dim, stride, ranks = split
    assert isinstance(dim, int)
    assert isinstance(stride, int)
    assert isinstance(ranks, int)
    return dim, stride, ranks


# How attributes follow the local shapes. `old` has the types before, `new` is the same op with local ones.

LocalRewrite = Callable[[Op, Op], Op]


def _as_it_is(old: Op, new: Op) -> Op:
    return new


def _with(op: Op, **attrs: Attr) -> Op:
    return replace(op, attrs={**op.attrs, **attrs})


def _shape(op: Op) -> tuple[int, ...]:
    return op.results[0].type.shape


def _dim(op: Op) -> int:
    """The dim that the attribute `dim` means, counted from the front."""
    return attr_int(op, "dim") % len(next(op.inputs()).type.shape)


def _result_shape(name: str) -> LocalRewrite:
    return lambda old, new: _with(new, **{name: _shape(new)})


def _first_size(old: Op, new: Op) -> Op:
    return _with(new, num_weights=_shape(new)[0])


def _squeeze(old: Op, new: Op) -> Op:
    """A dim that was split down to size one must stay: what goes is said by the result's shape."""
    if old.results[0].type == new.results[0].type:
        return new
    return Op("aten.view", new.operands, new.results, {"size": _shape(new)}, new.loc)


def _slice(old: Op, new: Op) -> Op:
    """A split dim is cut into equal parts, each of which is split: `(p! r) -> r`; the cut is at the same part."""
    dim = _dim(old)
    size, local = next(old.inputs()).type.shape[dim], next(new.inputs()).type.shape[dim]
    if size == local:
        return new
    start = attr_int(old, "start") if old.attrs.get("start") is not None else 0
    first = (max(start + size, 0) if start < 0 else start) * local // size
    return _with(new, start=first, end=first + _shape(new)[dim])


def _split(old: Op, new: Op) -> Op:
    dim = _dim(old)
    sizes = tuple(value.type.shape[dim] for value in new.results)
    return _with(new, split_sizes=sizes) if old.name == "aten.split_with_sizes" else _with(new, split_size=sizes[0])


def _counts(old: Op, new: Op) -> Op:
    if old.results[0].type.shape != _shape(new):
        raise _cannot_split(old, "its values depend on where the part lies")
    return new


_REWRITES: Mapping[str, LocalRewrite] = {
    **dict.fromkeys(("aten.view", "aten._unsafe_view", "aten.reshape", "aten.expand"), _result_shape("size")),
    **dict.fromkeys(
        ("aten.full", "aten.zeros", "aten.ones", "aten.empty", "aten.empty.memory_format"), _result_shape("size")
    ),
    **dict.fromkeys(("aten.new_full", "aten.new_zeros", "aten.new_ones", "aten.new_empty"), _result_shape("size")),
    **dict.fromkeys(("aten.squeeze", "aten.squeeze.dim", "aten.squeeze.dims"), _squeeze),
    "aten.slice.Tensor": _slice,
    **dict.fromkeys(("aten.split_with_sizes", "aten.split.Tensor"), _split),
    "aten.embedding_dense_backward": _first_size,
    "moai.grouped_outer": lambda old, new: _with(new, count=_shape(new)[0]),
    **dict.fromkeys(("aten.tril_indices", "aten.triu_indices"), _counts),
}
"""Ops whose attributes say something of sizes; every other op's attributes hold for any part."""
