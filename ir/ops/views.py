"""Views: reshapes, permutations, broadcasts and slices, which change how a tensor is looked at and copy nothing."""

from __future__ import annotations

from math import prod

from moaic.ir.graph import Op
from moaic.ir.layout import Mesh
from moaic.ir.ops.checks import operand_count, result_count, size_is_shape
from moaic.ir.ops.declaration import Complaints, Kind, OpDecl, each
from moaic.ir.ops.refitting import dim_from_front, result_shape, shape_in, with_attrs
from moaic.ir.ops.rule_building import (
    attr_int,
    attr_ints,
    elementwise,
    factor_names,
    from_front,
    linear_sets,
    operand_types,
    result_types,
    rule_of_factors,
    whole_dim,
)
from moaic.ir.printer import render_type
from moaic.ir.rules import Dims, Rule, refine, refine_empty
from moaic.ir.types import TensorType


def _view(op: Op) -> Rule:
    source, target = operand_types(op)[0].shape, op.results[0].type.shape
    left, right, sizes, whole = refine(source, target) if 0 not in source else refine_empty(source, target)
    return Rule((left,), (right,), sizes, whole, linear_sets(op, [(0,)]))


def _check_view(op: Op, mesh: Mesh) -> Complaints:
    yield from operand_count(op, 1)
    yield from result_count(op, 1)
    before, after = next(op.inputs()).type, op.results[0].type
    if prod(before.shape) != prod(after.shape):
        yield f"operand `{render_type(before, mesh)}` and result `{render_type(after, mesh)}` differ in their elements"
    yield from size_is_shape(op, mesh)


def _permute(op: Op) -> Rule:
    rank = len(op.results[0].type.shape)
    names = factor_names(rank)
    if op.name == "aten.permute":
        order = [from_front(d, rank) for d in attr_ints(op, "dims")]
    else:
        order = list(range(rank))
        if rank > 1:
            a, b = from_front(attr_int(op, "dim0"), rank), from_front(attr_int(op, "dim1"), rank)
            order[a], order[b] = b, a
    return rule_of_factors(op, [names], [[names[i] for i in order]], (0,))


def _transpose_2d(op: Op) -> Rule:
    names = factor_names(len(op.results[0].type.shape))
    return rule_of_factors(op, [names], [names[::-1]], (0,))


def _as_complex(op: Op) -> Rule:
    """Pairs along the last dim become one number each. Not linear: partial sums are reduced before, as real numbers."""
    names = factor_names(len(op.results[0].type.shape))
    return rule_of_factors(op, [[*names, "p!"]], [names])


def _as_real(op: Op) -> Rule:
    names = factor_names(len(operand_types(op)[0].shape))
    return rule_of_factors(op, [names], [[*names, "p!"]], (0,))


def _unsqueeze(op: Op) -> Rule:
    """Dims of size one carry no factor, so the others are matched in order."""
    source, target = operand_types(op)[0].shape, op.results[0].type.shape
    names = iter(factor_names(len(source)))
    left = [next(names) if size != 1 else "u" for size in source]
    kept = iter(name for name in left if name != "u")
    right = [next(kept) if size != 1 else "u" for size in target]
    return rule_of_factors(op, [left], [right], (0,))


def _squeeze_part(old: Op, new: Op) -> Op:
    """A dim that a split leaves at size one must stay, which only the result's shape says.

    Before: %y = aten.squeeze.dims %x {dim = [0, 1]} : f32[2{tp}], of f32[2{tp}, 1]
    After: %y = aten.view %x {size = [1]} : f32[1], of f32[1, 1]
    """
    if old.results[0].type == new.results[0].type:
        return new
    return Op("aten.view", new.operands, new.results, {"size": result_shape(new)}, new.loc)


def equal_parts(dim: int, whole: TensorType, part: int) -> tuple[Dims, Dims, dict[str, int]]:
    """Dims of a tensor cut into equal parts along `dim`, and of one part: `a (p! r)` and `a r`."""
    sizes = {f"d{i}": size for i, size in enumerate(whole.shape) if i != dim and size != 1}
    sizes |= {"p": whole.shape[dim] // part, "r": part}
    outer: list[tuple[str, ...]] = [(f"d{i}",) if size != 1 else () for i, size in enumerate(whole.shape)]
    inner = list(outer)
    outer[dim] = tuple(f for f in ("p", "r") if sizes[f] != 1)
    inner[dim] = ("r",) if part != 1 else ()
    return tuple(outer), tuple(inner), sizes


def _slice(op: Op) -> Rule:
    """A slice that is one of several equal parts splits within the part; any other holds its dim whole."""
    source, target = operand_types(op)[0], op.results[0].type
    dim = from_front(attr_int(op, "dim"), len(source.shape))
    part, start = target.shape[dim], attr_int(op, "start") if op.attrs.get("start") is not None else 0
    size = source.shape[dim]
    start = max(start + size, 0) if start < 0 else start
    if attr_int(op, "step", 1) == 1 and part and size % part == 0 and start % part == 0:
        left, right, sizes = equal_parts(dim, source, part)
        return Rule((left,), (right,), sizes, frozenset({"p"}), linear_sets(op, [(0,)]))
    return whole_dim((0,))(op)


def _slice_part(old: Op, new: Op) -> Op:
    """The dim falls into equal parts, each of which is split: `(p! r) -> r`; the slice is the same part of them.

    Before: %y = aten.slice.Tensor %x {start = 4, end = 8} : f32[4{tp}, 3], of f32[12{tp:2}, 3]
    After: %y = aten.slice.Tensor %x {start = 2, end = 4} : f32[2, 3], of f32[6, 3]
    """
    dim = dim_from_front(old)
    size, local = next(old.inputs()).type.shape[dim], next(new.inputs()).type.shape[dim]
    if size == local:
        return new
    start = attr_int(old, "start") if old.attrs.get("start") is not None else 0
    first = (max(start + size, 0) if start < 0 else start) * local // size
    return with_attrs(new, start=first, end=first + result_shape(new)[dim])


def _split(op: Op) -> Rule:
    source = operand_types(op)[0]
    dim = from_front(attr_int(op, "dim"), len(source.shape))
    parts = {t.shape[dim] for t in result_types(op)}
    if len(parts) == 1 and 0 not in parts:
        left, right, sizes = equal_parts(dim, source, parts.pop())
        return Rule((left,), (right,) * len(op.results), sizes, frozenset({"p"}), linear_sets(op, [(0,)]))
    return whole_dim((0,))(op)


def _split_part(old: Op, new: Op) -> Op:
    dim = dim_from_front(old)
    sizes = tuple(value.type.shape[dim] for value in new.results)
    is_list = old.name == "aten.split_with_sizes"
    return with_attrs(new, split_sizes=sizes) if is_list else with_attrs(new, split_size=sizes[0])


def _select(op: Op) -> Rule:
    shape = operand_types(op)[0].shape
    dim = from_front(attr_int(op, "dim"), len(shape))
    names = factor_names(len(shape))
    cut = [f"{n}!" if i == dim else n for i, n in enumerate(names)]
    return rule_of_factors(op, [cut], [[n for i, n in enumerate(names) if i != dim]], (0,))


def diagonal(op: Op) -> Rule:
    """`diagonal` and `diagonal_scatter`: the two dims are whole; the dim along both comes last."""
    rank = len(operand_types(op)[0].shape)
    taken = {from_front(attr_int(op, "dim1", 0), rank), from_front(attr_int(op, "dim2", 1), rank)}
    names = [f"x{i}!" if i in taken else f"d{i}" for i in range(rank)]
    along = [*(name for name in names if not name.endswith("!")), "y!"]
    operands = [names, along][: len(operand_types(op))]
    return rule_of_factors(op, operands, [along] if len(operands) == 1 else [names], tuple(range(len(operands))))


OPS = (
    OpDecl("aten.view", _view, Kind.VIEW, check=_check_view, refit=shape_in("size"), lowered=True),
    *each("_unsafe_view reshape", OpDecl("aten.*", None, check=_check_view, refit=shape_in("size"))),
    *each("permute transpose.int", OpDecl("aten.*", _permute, Kind.VIEW)),
    OpDecl("aten.t", _transpose_2d, Kind.VIEW),
    OpDecl("aten.expand", elementwise((0,)), Kind.VIEW, check=size_is_shape, refit=shape_in("size")),
    OpDecl("aten.view_as_complex", _as_complex, Kind.VIEW, lowered=True),
    OpDecl("aten.view_as_real", _as_real, Kind.VIEW),
    OpDecl("aten.unsqueeze", _unsqueeze, Kind.VIEW),
    *each("squeeze.dim squeeze.dims squeeze", OpDecl("aten.*", _unsqueeze, Kind.VIEW, refit=_squeeze_part)),
    OpDecl("aten.slice.Tensor", _slice, Kind.VIEW, refit=_slice_part),
    *each("split_with_sizes split.Tensor", OpDecl("aten.*", _split, Kind.VIEW, refit=_split_part)),
    OpDecl("aten.select.int", _select, Kind.VIEW),
    OpDecl("aten.diagonal", diagonal, Kind.VIEW),
)
