"""Localization of a function with layouts to the function that one rank runs: local shapes, and attributes for them.

The same text serves every rank. The coordinates on which a part depends, as of random numbers and look-ups, come in as
parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from moaic.ir.coordinate_dependent import PartBuilder
from moaic.ir.graph import Function, Op, Role, Value
from moaic.ir.layout import Layout, Mesh, Split, divided
from moaic.ir.ops import DECLARATIONS, Kind, declaration_of, kind_of
from moaic.ir.ops.refitting import cannot_split
from moaic.ir.types import TensorType


def localize(function: Function, mesh: Mesh, axes: Collection[str] | None = None) -> Function:
    """`function` as each rank of `mesh` runs it on its parts; with `axes`, its parts over these axes alone.

    Gains one trailing parameter, i64[] with role ("coordinate", axis), per axis whose coordinate an op depends on, in
    the order of the mesh. Raises Diagnostic for an op that cannot make a part.
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
    """Type of one rank's part over `axes`; its layout over the other axes stays."""
    shape, layout = list(tensor.shape), tensor.layout
    for axis in axes:
        split = layout.split_of(axis)
        layout = layout.without(axis)
        if split is not None:
            shape[split.dim] = divided(shape[split.dim], mesh.size(axis))
            splits = tuple(_within(other, split, mesh) for other in layout.splits)
            layout = Layout(splits, layout.partial, layout.owner)
    return TensorType(tensor.dtype, tuple(shape), layout)


def _within(split: Split, taken: Split, mesh: Mesh) -> Split:
    """`split` in the part that `taken` leaves: a stride outside that of `taken` shrinks with the dim."""
    outside = split.dim == taken.dim and split.stride > taken.stride
    return replace(split, stride=split.stride // mesh.size(taken.axis)) if outside else split


def coordinate_dims(op: Op) -> Iterator[tuple[Value, int]]:
    """The dims whose split makes the parts of `op` depend on coordinates, each as a value and one of its dims."""
    by_coordinate = declaration_of(op).by_coordinate
    return iter(()) if by_coordinate is None else by_coordinate.dims(op)


def asked_axes(op: Op, axes: Collection[str]) -> set[str]:
    """The axes among `axes` on whose coordinate the parts of `op` depend."""
    return {split.axis for value, dim in coordinate_dims(op) for split in value.type.layout.on_dim(dim)} & {*axes}


def _asked_axes(function: Function, axes: Collection[str]) -> list[str]:
    used = {axis for op in function.ops for axis in asked_axes(op, axes)}
    return [axis for axis in axes if axis in used]


def _local_op(op: Op, local: Mapping[Value, Value], coordinates: Mapping[str, Value], mesh: Mesh) -> list[Op]:
    assert kind_of(op) is not Kind.INSTRUCTION, f"{op.name} is for the worker, not for a compiled function"
    new = replace(op.with_operands(local), results=tuple(local[value] for value in op.results))
    by_coordinate = declaration_of(op).by_coordinate
    if by_coordinate is not None and (by_coordinate.always or asked_axes(op, coordinates)):
        work = PartBuilder(new, coordinates, mesh, loc=new.loc)
        by_coordinate.rewrite(work, op)
        return work.ops
    changed = any(local[value].type.shape != value.type.shape for value in (*op.inputs(), *op.results))
    if op.name not in DECLARATIONS and changed:
        raise cannot_split(op, "it has no rule")
    return [refit(op, new)]


def refit(old: Op, new: Op) -> Op:
    """`new`, the op on local types, with the attributes of `old` changed to fit its shapes."""
    rewrite = declaration_of(old).refit
    return new if rewrite is None else rewrite(old, new)
