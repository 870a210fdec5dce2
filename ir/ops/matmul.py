"""Products of matrices."""

from __future__ import annotations

from moaic.ir.graph import Op
from moaic.ir.layout import Mesh
from moaic.ir.op_names import SCALED_MM
from moaic.ir.ops.checks import operand_count, result_count, shapes
from moaic.ir.ops.declaration import Check, Complaints, Kind, OpDecl
from moaic.ir.ops.rule_building import flops_by_factors, from_text, operand_types, result_types
from moaic.ir.printer import render_attr, render_type
from moaic.ir.rules import Rule, rule_from_text

SCALED_BLOCK = 16
"""Columns of both matrices of `moai.scaled_mm` come in blocks of this size on every rank: GPUs take no others."""

_MM = from_text("m k, k n -> m n", (0,), (1,))
_BMM = from_text("b m k, b k n -> b m n", (0,), (1,))


def _matrices(spelled: str) -> Check:
    def check(op: Op, mesh: Mesh) -> Complaints:
        yield from operand_count(op, 2)
        yield from result_count(op, 1)
        yield from shapes(op, spelled, [*op.inputs(), *op.results], {})

    return check


def _scaled_mm(op: Op) -> Rule:
    (_, k), (_, n) = (tensor.shape for tensor in operand_types(op)[:2])
    sizes = _blocks("k", k) | _blocks("n", n)
    text = "m (ko ki!), (ko ki!) (no ni!), m u, u (no ni!) -> m (no ni!)"
    return rule_from_text(text, operand_types(op), result_types(op), sizes=sizes)


def _blocks(factor: str, size: int) -> dict[str, int]:
    """Sizes of the two factors of a dim that splits at blocks alone; a size that blocks do not divide stays whole."""
    count, block = (size // SCALED_BLOCK, SCALED_BLOCK) if size % SCALED_BLOCK == 0 else (1, size)
    return {f"{factor}{name}": size for name, size in (("o", count), ("i", block)) if size != 1}


def _check_scaled_mm(op: Op, mesh: Mesh) -> Complaints:
    yield from operand_count(op, 4)
    yield from result_count(op, 1)
    left, right, *scales = op.inputs()
    sizes: dict[str, int] = {}
    yield from shapes(op, "mk kn mn", [left, right, *op.results], sizes)
    for scale, wanted in zip(scales, ((sizes["m"], 1), (1, sizes["n"])), strict=True):
        if scale.type.shape not in (wanted, (1, 1)):
            yield f"a scale is of [1, 1] or {list(wanted)}, not `{render_type(scale.type, mesh)}`"
    if op.attrs.get("dtype") != op.results[0].type.dtype:
        said = render_attr(op.attrs.get("dtype"))
        yield f"attribute `dtype` is `{said}`, the result `{render_type(op.results[0].type, mesh)}`"


OPS = (
    OpDecl("aten.mm", _MM, Kind.HEAVY, flops_by_factors(_MM), "mm", _matrices("mk kn mn"), lowered=True),
    OpDecl("aten.bmm", _BMM, Kind.HEAVY, flops_by_factors(_BMM), "mm", _matrices("bmk bkn bmn")),
    OpDecl(SCALED_MM, _scaled_mm, Kind.HEAVY, flops_by_factors(_scaled_mm), "mm", _check_scaled_mm, lowered=True),
)
