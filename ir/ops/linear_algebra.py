"""Linear algebra on batches of matrices, and Fourier transforms."""

from __future__ import annotations

from moaic.ir.graph import Op
from moaic.ir.ops.declaration import OpDecl, RuleMaker, each
from moaic.ir.ops.rule_building import (
    attr_ints,
    factor_names,
    operand_types,
    result_types,
    rule_of_factors,
    whole_dims,
    whole_rule,
)
from moaic.ir.rules import Rule


def _batched(operands: tuple[int, ...], results: tuple[int, ...], *linear: tuple[int, ...]) -> RuleMaker:
    """A batch of independent calls: per tensor so many trailing dims are whole, the dims before them are the batch.

    Batch dims are broadcast. Where a tensor has fewer dims, as results that are not computed do, all is whole.
    """

    def make(op: Op) -> Rule:
        sides = ((operand_types(op), operands), (result_types(op), results))
        pairs = [list(zip(types, inner, strict=True)) for types, inner in sides]
        spans = [len(tensor.shape) - inner for side in pairs for tensor, inner in side]
        if min(spans) < 0 or set(spans[len(operands) :]) != {max(spans)}:
            return whole_rule(op)
        names = factor_names(max(spans), "b")
        left, right = (
            [
                [*names[len(names) + inner - len(tensor.shape) :], *(f"{side}{at}x{i}!" for i in range(inner))]
                for at, (tensor, inner) in enumerate(each_side)
            ]
            for side, each_side in zip("lr", pairs, strict=True)
        )
        return rule_of_factors(op, left, right, *linear)

    return make


def _solve(op: Op) -> Rule:
    """Right sides are matrices, or vectors if there is exactly one for each matrix on the left."""
    left, right = (tensor.shape for tensor in operand_types(op))
    sides = 1 if right == left[:-1] else 2
    return _batched((2, sides), (sides, 2, 1, 0))(op)


def _fourier(op: Op) -> Rule:
    """Not linear: partial sums are reduced before, where they may be real numbers."""
    return whole_dims(op, attr_ints(op, "dim"))


OPS = (
    *each("_fft_r2c _fft_c2c _fft_c2r", OpDecl("aten.*", _fourier)),
    OpDecl("aten.linalg_solve_triangular", _batched((2, 2), (2,), (1,))),
    OpDecl("aten.linalg_lu_solve", _batched((2, 1, 2), (2,), (2,))),
    *each("linalg_cholesky_ex linalg_inv_ex", OpDecl("aten.*", _batched((2,), (2, 0)))),
    OpDecl("aten.linalg_qr", _batched((2,), (2, 2))),
    OpDecl("aten.linalg_lu_factor_ex", _batched((2,), (2, 1, 0))),
    OpDecl("aten._linalg_solve_ex", _solve),
    OpDecl("aten._linalg_det", _batched((2,), (0, 2, 1))),
    OpDecl("aten._linalg_slogdet", _batched((2,), (0, 0, 2, 1))),
    OpDecl("aten._linalg_svd", _batched((2,), (2, 1, 2))),
    OpDecl("aten._linalg_eigh", _batched((2,), (1, 2))),
)
