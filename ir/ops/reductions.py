"""Reductions, scans and sorts along dims."""

from __future__ import annotations

from moaic.ir.graph import Op
from moaic.ir.ops.declaration import OpDecl, RuleMaker, each
from moaic.ir.ops.rule_building import attr_ints, factor_names, from_front, operand_types, rule_of_factors, whole_dim
from moaic.ir.rules import Rule


def reduced_dims(op: Op) -> tuple[int, ...]:
    """Dims that a reduction removes or keeps at size one."""
    return _dims_of(op, attr_ints(op, "dim"))


def _dims_of(op: Op, dims: tuple[int, ...]) -> tuple[int, ...]:
    rank = len(operand_types(op)[0].shape)
    return tuple(from_front(d, rank) for d in dims) if dims else tuple(range(rank))


def _reduction(*linear: tuple[int, ...], sums: bool = False, default: int | None = None) -> RuleMaker:
    """Reduces the dims named by `dim`, else `default`, else all; they can be split only where the op sums over them."""

    def make(op: Op) -> Rule:
        shape = operand_types(op)[0].shape
        dims = reduced_dims(op) if default is None or "dim" in op.attrs else _dims_of(op, (default,))
        mark = "" if sums else "!"
        names = [f"d{i}{mark}" if i in dims else f"d{i}" for i in range(len(shape))]
        kept = len(op.results[0].type.shape) == len(shape)
        out = [f"u{i}" if i in dims else f"d{i}" for i in range(len(shape)) if kept or i not in dims]
        return rule_of_factors(op, [names], [out] * len(op.results), *linear)

    return make


def _histogram(op: Op) -> Rule:
    """Counts of parts add up, unless their range is that of the values."""
    of_values = op.attrs.get("min", 0) == op.attrs.get("max", 0)
    names = factor_names(len(operand_types(op)[0].shape))
    return rule_of_factors(op, [[f"{name}!" for name in names] if of_values else names], [["b!"]])


OPS = (
    *each("sum sum.dim_IntList", OpDecl("aten.*", _reduction((0,), sums=True))),
    *each("mean mean.dim", OpDecl("aten.*", _reduction((0,)))),
    *each(
        "amax amin any any.dim any.dims all all.dim argmax argmin max.dim min.dim",
        OpDecl("aten.*", _reduction(), exact=True),
    ),
    *each("prod prod.dim_int var.correction var_mean.correction", OpDecl("aten.*", _reduction())),
    OpDecl("aten.logsumexp", _reduction(), cost="costly"),
    *each("median.dim nanmedian.dim kthvalue mode", OpDecl("aten.*", _reduction(default=-1))),
    OpDecl("aten.histc", _histogram),
    *each("topk sort sort.stable", OpDecl("aten.*", whole_dim(default=-1), cost="costly", exact=True)),
    OpDecl("aten.cumsum", whole_dim((0,))),
    *each("cumprod logcumsumexp cummax cummin", OpDecl("aten.*", whole_dim())),
)
