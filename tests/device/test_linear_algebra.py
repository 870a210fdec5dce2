"""Gradients of linear algebra do not depend on the strides of a matrix, from which PyTorch tells what was factored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore::moaic.device.cpu_fallback.HostWarning")  # of lstsq

LINALG: Any = torch.linalg

Call = Callable[[Tensor, Tensor], Tensor]

CALLS: Mapping[str, Call] = {
    "det": lambda matrix, right: LINALG.det(matrix),
    "slogdet": lambda matrix, right: LINALG.slogdet(matrix).logabsdet,
    "logdet": lambda matrix, right: torch.logdet(matrix),
    "of a transpose": lambda matrix, right: LINALG.det(matrix.mT) + LINALG.slogdet((matrix * 2).mT).logabsdet,
    "solve": LINALG.solve,
    "solve from the right": lambda matrix, right: LINALG.solve(matrix, right.mT, left=False),
    "solve for vectors": lambda matrix, right: LINALG.solve(matrix, right[..., 0]),
    "factors": lambda matrix, right: LINALG.lu_solve(*LINALG.lu_factor(matrix), right),
    "inv": lambda matrix, right: LINALG.inv(matrix),
    "lstsq": lambda matrix, right: LINALG.lstsq(matrix, right).solution,
}

ORDERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "row-major": lambda matrix: matrix,
    "column-major": lambda matrix: matrix.mT.contiguous().mT,
    "batch last": lambda matrix: matrix.movedim(0, -1).contiguous().movedim(-1, 0),
}

KINDS = [((), torch.float32), ((2,), torch.float64), ((2, 1), torch.float32)]


def everything(matrix: Tensor, right: Tensor) -> Tensor:
    return torch.stack([call(matrix, right).square().sum() for call in CALLS.values()])


def positive(batch: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Matrices with a positive determinant, far from symmetric."""
    return 4 * torch.eye(3, dtype=dtype) + torch.arange(9.0, dtype=dtype).reshape(3, 3).sin().expand(*batch, 3, 3)


def gradients(call: Call, matrix: Tensor, device: str) -> list[Tensor]:
    right = torch.arange(1.0, matrix.shape[:-1].numel() * 2 + 1, dtype=matrix.dtype).reshape(*matrix.shape[:-1], 2)
    leaves = [leaf.to(device).requires_grad_() for leaf in (matrix, right)]
    assert leaves[0].stride() == matrix.stride()
    result = call(*leaves)
    weights = torch.arange(1.0, result.numel() + 1, dtype=matrix.dtype, device=device)
    (result.flatten() * weights).sum().backward()
    return [tensor.cpu() for tensor in (result.detach(), *(leaf.grad for leaf in leaves)) if tensor is not None]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("accelerator")
def test_op_by_op(name: str, order: str) -> None:
    for batch, dtype in KINDS:
        matrix = ORDERS[order](positive(batch, dtype).contiguous())
        torch.testing.assert_close(gradients(CALLS[name], matrix, "moai"), gradients(CALLS[name], matrix, "cpu"))


@pytest.mark.filterwarnings("ignore")  # of Dynamo, about itself
@pytest.mark.parametrize(
    ("order", "kind", "is_compiled"),
    [("row-major", KINDS[0], False), ("column-major", KINDS[1], True), ("batch last", KINDS[1], False)],
)
def test_in_a_graph(order: str, kind: tuple[tuple[int, ...], torch.dtype], is_compiled: bool) -> None:
    torch.compiler.reset()
    matrix = ORDERS[order](positive(*kind).contiguous())
    ours: Any = torch.compile(everything, backend="moai", dynamic=False, options={"compile": is_compiled})
    torch.testing.assert_close(gradients(ours, matrix, "moai"), gradients(everything, matrix, "cpu"))


@pytest.mark.usefixtures("accelerator")
def test_complex_matrices() -> None:
    matrix = torch.view_as_complex(torch.stack([positive((), torch.float32), torch.ones(3, 3).tril()], -1)).mT

    def size(matrix: Tensor, right: Tensor) -> Tensor:
        return LINALG.det(matrix).abs() + LINALG.slogdet(matrix).logabsdet + right.sum().abs()

    torch.testing.assert_close(gradients_of_complex(size, matrix, "moai"), gradients_of_complex(size, matrix, "cpu"))


def gradients_of_complex(call: Call, matrix: Tensor, device: str) -> Tensor:
    leaf = matrix.detach().to(device).requires_grad_()
    call(leaf, leaf).backward()
    assert leaf.grad is not None
    return leaf.grad.cpu()
