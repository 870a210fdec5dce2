"""Corners of the eager device: layouts of results, inference mode, lazy modules, sparse tensors, refused types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytestmark = [pytest.mark.usefixtures("accelerator"), pytest.mark.filterwarnings("ignore::UserWarning")]

MOAI = "moai"

ATEN: Any = torch.ops.aten
LINALG: Any = torch.linalg
TORCH: Any = torch


def matrix(d: str) -> Tensor:
    return (torch.arange(9.0).view(3, 3) + 4 * torch.eye(3)).to(d)


def definite(d: str) -> Tensor:
    return matrix(d) @ matrix(d).t()


def empty(d: str, *dtypes: torch.dtype) -> Any:
    made = [torch.empty(0, dtype=dtype, device=d) for dtype in dtypes or (torch.float32,)]
    return tuple(made) if len(made) > 1 else made[0]


F32, I32, C64 = torch.float32, torch.int32, torch.complex64

LAYOUTS: list[Callable[[str], Any]] = [
    lambda d: LINALG.inv(matrix(d), out=empty(d)),
    lambda d: LINALG.qr(matrix(d), out=empty(d, F32, F32)),
    lambda d: LINALG.svd(matrix(d), out=empty(d, F32, F32, F32)),
    lambda d: LINALG.eigh(definite(d), out=empty(d, F32, F32)),
    lambda d: LINALG.eig(matrix(d), out=empty(d, C64, C64)),
    lambda d: LINALG.lu_factor(matrix(d), out=empty(d, F32, I32)),
    lambda d: LINALG.ldl_factor(definite(d), out=empty(d, F32, I32)),
    lambda d: torch.cholesky_inverse(matrix(d), out=empty(d)),
    lambda d: TORCH.geqrf(matrix(d), out=empty(d, F32, F32)),
    lambda d: TORCH.fft.fft(matrix(d)[0], out=empty(d, C64)),
    lambda d: TORCH.fft.irfft(matrix(d).to(C64), out=empty(d)),
    lambda d: torch.mul(matrix(d).t(), 2, out=empty(d)),
    lambda d: nn.functional.dropout(matrix(d).t(), 0.5),
    lambda d: nn.functional.dropout(matrix(d)[:1].expand(3, 3), 0.5),
    lambda d: ATEN.native_dropout(matrix(d).t(), 0.5, True),
    lambda d: ATEN.multilabel_margin_loss_forward(matrix(d)[0], torch.tensor([2, 0, -1], device=d), 0),
    lambda d: ATEN.multilabel_margin_loss_forward(matrix(d)[:1], torch.tensor([[2, 0, -1]], device=d), 0),
    lambda d: ATEN._native_batch_norm_legit_no_training(matrix(d), *[torch.ones(3, device=d)] * 4, 0.1, 1e-5),
    lambda d: ATEN.native_batch_norm(matrix(d), *[torch.ones(3, device=d)] * 4, False, 0.1, 1e-5),
    lambda d: ATEN.mse_loss_backward(torch.ones((), device=d), matrix(d)[:0], matrix(d)[:0], 1),
    lambda d: torch.view_copy(matrix(d).t(), (9,)),
    lambda d: LINALG.lstsq(matrix(d)[:, :2].expand(2, 3, 2), matrix(d)[:, 2:].expand(2, 3, 1)),
    lambda d: torch.arange(6, device=d).to(torch.uint64)[::2].clone(),
    lambda d: torch.arange(6, device=d).view(2, 3).t().to(torch.float8_e4m3fn).contiguous().view(torch.uint8),
]


def listed(made: Any) -> list[Tensor]:
    return [made] if isinstance(made, Tensor) else list(made)


@pytest.mark.parametrize("make", LAYOUTS)
def test_results_have_the_layout_of_the_cpu(make: Callable[[str], Any]) -> None:
    torch.manual_seed(1)
    expected = listed(make("cpu"))
    torch.manual_seed(1)
    for wanted, found in zip(expected, listed(make(MOAI)), strict=True):
        assert (found.shape, found.stride(), found.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
        torch.testing.assert_close(found.cpu(), wanted)


def test_a_model_moved_in_inference_mode_can_be_trained_after() -> None:
    model = nn.Linear(3, 2)
    with torch.inference_mode():
        model.to(MOAI)
        assert model(torch.ones(1, 3, device=MOAI)).shape == (1, 2)
    model(torch.ones(1, 3, device=MOAI)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[1, 1, 1]] * 2


def test_a_model_made_in_inference_mode_moves() -> None:
    with torch.inference_mode():
        model = nn.Linear(3, 2)
        moved = nn.Linear(3, 2).to(MOAI)
    assert model.to(MOAI)(torch.ones(1, 3, device=MOAI)).shape == (1, 2)
    assert moved(torch.ones(1, 3, device=MOAI)).shape == (1, 2)


def test_lazy_modules_move() -> None:
    model: Any = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d()).to(MOAI)
    model(torch.ones(2, 3, 5, 5, device=MOAI)).sum().backward()
    assert model[0].weight.device.type == MOAI
    assert model[0].weight.grad.shape == (4, 3, 3, 3)


def test_results_for_tensors_of_the_host_can_be_written(accelerator: str) -> None:
    if accelerator == "workers":
        model = nn.Linear(3, 2)
        compiled: Any = torch.compile(model, backend="moai")
        loss = compiled(torch.ones(4, 3)).sum()
        loss /= 4
        out = compiled(torch.ones(4, 3))
        out /= 4
        (loss + out.sum()).backward()
        assert model.bias.grad is not None
        assert model.bias.grad.tolist() == [2, 2]
        with torch.inference_mode():
            inferring: Any = torch.compile(nn.Linear(3, 2), backend="moai")
            assert inferring(torch.ones(4, 3)).shape == (4, 2)


SPARSE: list[Callable[[], Any]] = [
    lambda: TORCH.eye(3).to_sparse().to(MOAI),
    lambda: torch.eye(3, device=MOAI).to_sparse(),
    lambda: repr(TORCH.eye(3).to_sparse_csr().to(MOAI)),
    lambda: TORCH.eye(3, device=MOAI).to_sparse_csr(),
    lambda: TORCH.sparse.mm(TORCH.eye(3).to_sparse(), torch.ones(3, 3, device=MOAI)),
]


@pytest.mark.parametrize("make", SPARSE)
def test_sparse_tensors_are_refused_in_a_line(make: Callable[[], Any]) -> None:
    with pytest.raises(NotImplementedError, match="dense tensors only") as refused:
        make()
    assert str(refused.value).count("\n") < 3


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_nested_tensors_are_jagged_or_refused_in_a_line() -> None:
    parts = [torch.ones(2, 3), torch.zeros(1, 3)]
    nested = TORCH.nested.nested_tensor
    assert [part.tolist() for part in nested(parts, layout=torch.jagged).to(MOAI)] == [part.tolist() for part in parts]
    with pytest.raises(NotImplementedError, match=r"layout=torch\.jagged"):
        nested(parts, layout=torch.strided).to(MOAI)


def test_functorch_works_after_a_tensor_that_cannot_be_printed() -> None:
    with pytest.raises(NotImplementedError, match="dense tensors only"):
        repr(TORCH.eye(3).to_sparse_csr().to(MOAI))
    for device in ("cpu", MOAI):
        assert TORCH.func.grad(torch.sum)(torch.ones(3, device=device)).tolist() == [1, 1, 1]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_results_in_a_list_resize_an_expanded_tensor() -> None:
    values = torch.ones((), device=MOAI).expand(2)
    torch.max(torch.tensor([3.0, 4.0], device=MOAI), 0, out=(values, torch.empty(0, dtype=torch.int64, device=MOAI)))
    assert values.shape == ()
    assert values.item() == 4


REFUSED: list[Callable[[str], Any]] = [
    lambda d: torch.ones(3, device=d) & torch.ones(3, dtype=torch.int32, device=d),
    lambda d: torch.ones(3, device=d).bitwise_or_(torch.ones(3, dtype=torch.int32, device=d)),
    lambda d: torch.gcd(torch.ones(40, 500, device=d), torch.ones(40, 500, device=d)),
    lambda d: torch.ones(3, dtype=torch.complex64, device=d).floor(),
]


@pytest.mark.parametrize("make", REFUSED)
def test_types_that_the_cpu_refuses_are_refused_at_the_line(make: Callable[[str], Any]) -> None:
    for device in ("cpu", MOAI):
        with pytest.raises((NotImplementedError, RuntimeError)) as refused:
            make(device)
        assert "not " in str(refused.value)
    assert torch.ones(2, device=MOAI).tolist() == [1, 1]


def test_what_a_compiled_backward_reads_may_not_be_written_before(accelerator: str) -> None:
    if accelerator == "workers":
        model: Any = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(MOAI)
        compiled: Any = torch.compile(model, backend="moai")
        x = torch.arange(6.0, device=MOAI).view(2, 3)
        first, second = compiled(x).sum(), compiled(x).sum()  # the statistics are written by the calls themselves
        with torch.no_grad():
            model[0].bias.add_(1)  # no gradient depends on it
        (first + second).backward()
        for given, written in ((x, x), (x[:1], x), (x.detach(), x), (x, model[2].weight.detach())):
            model.train(given.shape[0] > 1)
            loss = compiled(given).sum()
            written.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
