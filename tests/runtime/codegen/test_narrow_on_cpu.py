"""Products of 16-bit floats that a CPU cannot multiply are those of float32, rounded once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from moaic.ir.graph import Function, Op, Value
from moaic.ir.types import TensorType
from moaic.runtime.codegen import narrow_on_cpu
from moaic.runtime.codegen.compile import compile_function
from moaic.runtime.codegen.lower_to_fx import run_op
from moaic.runtime.codegen.narrow_on_cpu import widened
from moaic.runtime.dtypes import DTYPES

ATEN: Any = torch.ops.aten


@pytest.fixture(params=["f16", "bf16"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A type that the CPU lacks."""
    monkeypatch.setattr(narrow_on_cpu, "lacking", lambda: frozenset({DTYPES[request.param]}))
    return request.param


def drawn(dtype: str, *shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).to(DTYPES[dtype]) for shape in shapes]


def op(name: str, dtype: str, operands: Sequence[Tensor], results: Sequence[tuple[int, ...]], **attrs: Any) -> Op:
    params = tuple(Value(TensorType(dtype, tuple(each.shape))) for each in operands)
    return Op(name, params, tuple(Value(TensorType(dtype, shape)) for shape in results), attrs)


def test_products_are_rounded_once(dtype: str) -> None:
    left, right = drawn(dtype, (40, 300), (300, 20))
    (made,) = run_op(op("aten.mm", dtype, (left, right), [(40, 20)]), (left, right))
    assert torch.equal(made, (left.float() @ right.float()).to(made.dtype))
    assert made.dtype == DTYPES[dtype]


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`")  # torch's own, of its own code
def test_compiled_functions_do_the_same(dtype: str) -> None:
    left, right = drawn(dtype, (40, 300), (300, 20))
    product = op("aten.mm", dtype, (left, right), [(40, 20)])
    params: Any = product.operands
    run = compile_function(Function("product", params, (product,), product.results), compiled=True)
    (made,) = run([left, right])
    torch.testing.assert_close(made, (left.float() @ right.float()).to(made.dtype), rtol=1e-2, atol=1e-2)


def test_eager_ops_do_the_same(dtype: str) -> None:
    image, weight, bias = drawn(dtype, (2, 3, 8, 8), (4, 3, 3, 3), (4,))
    shape = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    made = widened(ATEN.convolution.default)(image, weight, bias, *shape)
    wide = ATEN.convolution.default(image.float(), weight.float(), bias.float(), *shape)
    assert torch.equal(made, wide.to(made.dtype))
    grads = widened(ATEN.convolution_backward.default)(made, image, weight, [4], *shape, [True] * 3)
    assert [grad.dtype for grad in grads] == [made.dtype] * 3


def test_operands_of_several_types_are_refused(dtype: str) -> None:
    (left,) = drawn(dtype, (4, 6))
    for right in drawn("f32", (6, 5)), drawn("f64", (6, 5)):
        with pytest.raises(RuntimeError, match="same dtype"):
            widened(ATEN.mm.default)(left, *right)
        with pytest.raises(RuntimeError, match="same dtype"):
            run_op(op("aten.mm", dtype, (left, *right), [(4, 5)]), (left, *right))


def test_other_types_and_ops_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow_on_cpu, "lacking", lambda: frozenset({torch.float16}))
    for dtype in ("f32", "bf16"):
        left, right = drawn(dtype, (4, 6), (6, 5))
        assert torch.equal(widened(ATEN.mm.default)(left, right), left @ right)
    one, other = drawn("f16", (4, 6), (4, 6))
    assert torch.equal(widened(ATEN.add.Tensor)(one, other), one + other)
