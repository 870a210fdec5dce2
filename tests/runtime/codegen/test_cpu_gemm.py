from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moaic.ir.graph import Function, Op, Value
from moaic.ir.types import TensorType
from moaic.runtime.codegen import cpu_gemm
from moaic.runtime.codegen.compile import compile_function
from moaic.runtime.codegen.cpu_gemm import LEAST_FLOPS, product

LARGE = (256, 384, 512)
"""Rows, inner size and columns of a product that either library may do."""


@pytest.fixture(params=(False, True), ids=("mkl", "onednn"))
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(cpu_gemm, "_mkl_is_slower", lambda: request.param)
    return request.param


def matrix(rows: int, columns: int, strides: str) -> Tensor:
    """By rows, by columns, or a part of a larger matrix."""
    if strides == "columns":
        return torch.randn(columns, rows).t()
    return torch.randn(rows, columns + 3)[:, 1 : columns + 1] if strides == "part" else torch.randn(rows, columns)


def exact(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() @ b.double()).float()


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("left", ["rows", "columns", "part"])
@pytest.mark.parametrize("right", ["rows", "columns", "part"])
@pytest.mark.parametrize("sizes", [LARGE, (1, 4096, 4096), (4097, 511, 9), (3, 5, 7), (0, 4, 4), (4, 0, 4)])
def test_products_are_those_of_float64(sizes: tuple[int, int, int], left: str, right: str) -> None:
    rows, inner, columns = sizes
    a, b = matrix(rows, inner, left), matrix(inner, columns, right)
    torch.testing.assert_close(product(a, b), exact(a, b), rtol=1e-5, atol=1e-5 * max(1, inner) ** 0.5)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`")  # torch's own, of its own code
def test_a_compiled_function_uses_the_chosen_library(library: bool) -> None:
    rows, inner, columns = LARGE
    assert 2 * rows * inner * columns >= LEAST_FLOPS
    x, w, y = (Value(TensorType("f32", shape)) for shape in ((rows, inner), (inner, columns), (rows, columns)))
    run = compile_function(Function("product", (x, w), (Op("aten.mm", (x, w), (y,)),), (y,)), compiled=True)
    a, b = torch.randn(rows, inner), torch.randn(inner, columns)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        (made,) = run([a, b])
    torch.testing.assert_close(made, exact(a, b), rtol=1e-4, atol=1e-4)
    assert ("moai::product" in profile.key_averages().table()) == library
    assert made.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_number_types_are_left_to_pytorch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_gemm, "_mkl_is_slower", lambda: pytest.fail("asked about another number type"))
    rows, inner, columns = LARGE
    a, b = torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)
    assert torch.equal(product(a, b), a @ b)
