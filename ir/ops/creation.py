"""Ops that make tensors from attributes: constants, ranges, indices of triangles."""

from __future__ import annotations

from collections.abc import Iterator

from moaic.ir.coordinate_dependent import INDEX, PartBuilder
from moaic.ir.graph import Op, Value
from moaic.ir.ops.checks import size_is_shape
from moaic.ir.ops.declaration import ByCoordinate, Kind, OpDecl, each
from moaic.ir.ops.refitting import never_split, shape_in
from moaic.ir.ops.rule_building import elementwise, factor_names, result_types, rule_of_factors, whole_rule
from moaic.ir.rules import Rule


def _nullary(op: Op) -> Rule:
    return rule_of_factors(op, [], [factor_names(len(t.shape)) for t in result_types(op)])


def _range_dim(op: Op) -> Iterator[tuple[Value, int]]:
    yield op.results[0], 0


def _range_from_coordinate(work: PartBuilder, old: Op) -> None:
    """`start + step * i` of the global indices i that the rank holds.

    Before: %r = aten.arange {end = 8} : i64[8{dp}]
    After: %i = aten.add.Tensor ... the indices of the rank's part, from its coordinate %dp
           %r = aten.add.Tensor (%i * step), _ {other = start} : i64[4]
    """
    (result,), (whole,) = work.new.results, old.results
    start, step = (old.attrs.get(name, other) for name, other in (("start", 0), ("step", 1)))
    along = work.positions(result.type.shape[0], work.splits(whole, 0), result.type.layout)
    if result.type.dtype != INDEX:
        along = work.emit("aten._to_copy", [along], result.type, dtype=result.type.dtype)
    along = work.emit("aten.mul.Tensor", [along, None], result.type, other=step)
    work.finish("aten.add.Tensor", [along, None], other=start)


OPS = (
    *each("full zeros ones", OpDecl("aten.*", _nullary, Kind.NULLARY, check=size_is_shape, refit=shape_in("size"))),
    OpDecl("aten.empty.memory_format", _nullary, Kind.NULLARY, refit=shape_in("size")),
    OpDecl("aten.scalar_tensor", _nullary, Kind.NULLARY),
    *each(
        "arange arange.start arange.start_step",
        OpDecl("aten.*", _nullary, Kind.NULLARY, by_coordinate=ByCoordinate(_range_dim, _range_from_coordinate)),
    ),
    *each(
        "tril_indices triu_indices",
        OpDecl("aten.*", whole_rule, Kind.NULLARY, refit=never_split("its values depend on where the part lies")),
    ),
    *each("full_like zeros_like ones_like", OpDecl("aten.*", elementwise(), exact=True)),
    *each("empty new_full new_zeros new_ones new_empty", OpDecl("aten.*", None, refit=shape_in("size"))),
)
