"""Cases of decompositions, solvers and Fourier transforms."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from moaic.ir.graph import Attr
from tests.ir.op_cases.drawing import Case, Cases, Drawn, case

cases = Cases()


def regular(d: Drawn, *batch: int) -> Tensor:
    """Symmetric matrices far from singular."""
    size = d.number(1, 4)
    x = d.unit(*batch, size, size)
    return x @ x.mT + torch.eye(size, dtype=x.dtype)


@cases("linalg_cholesky_ex linalg_inv_ex linalg_qr linalg_lu_factor_ex _linalg_det _linalg_slogdet")
def taken_apart(d: Drawn, name: str) -> Case:
    return case(name, regular(d, *d.shape(0, 2)))


@cases("_linalg_svd _linalg_eigh")
def spectrum(d: Drawn, name: str) -> Case:
    """With and without vectors, which are no results then but tensors of nothing."""
    wanted: dict[str, Attr] = {"compute_uv" if name.endswith("svd") else "compute_v": d.pick(True, True, False)}
    return case(name, regular(d, *d.shape(0, 2)), **wanted)


@cases("linalg_solve_triangular _linalg_solve_ex linalg_lu_solve")
def solved(d: Drawn, name: str) -> Case:
    """Many systems, or right sides of many for one system."""
    batch = d.shape(0, 2)
    left = regular(d, *(batch if name.endswith("ex") else d.narrower(batch)))
    vectors = name.endswith("ex") and d.pick(False, False, True)
    right = d.fine(*batch, left.shape[-1], *(() if vectors else (d.size(),)))
    if name == "aten.linalg_lu_solve":
        factors, pivots, _ = torch.ops.aten.linalg_lu_factor_ex(left)
        return case(name, factors, pivots, right)
    if name == "aten._linalg_solve_ex":
        return case(name, left, right)
    upper = d.pick(False, True)
    return case(name, left.triu() if upper else left.tril(), right, upper=upper)


@cases("_fft_r2c _fft_c2c _fft_c2r")
def transformed(d: Drawn, name: str) -> Case:
    shape = d.shape(1)
    dims = d.draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, max_size=2, unique=True))
    x = d.real(*shape) if name.endswith("r2c") else d.complex(*shape)
    attrs: dict[str, Attr] = {"dim": tuple(dims), "normalization": d.pick(0, 1)}
    if name == "aten._fft_c2r":
        return case(name, x, **attrs, last_dim_size=max(1, 2 * (shape[dims[-1]] - 1)))
    side = "onesided" if name.endswith("r2c") else "forward"
    return case(name, x, **attrs, **{side: d.pick(False, True)})
