"""Graphs that cannot be captured run op by op: values, gradients and writes as in plain PyTorch, with one warning."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import graph_break
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from moaic.capture.trace_only import take_call
from moaic.ir.errors import Diagnostic

pytestmark = pytest.mark.filterwarnings("ignore")  # of Dynamo, about itself


@torch.library.custom_op("tests_of_moai::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    """An op of a library, that nobody has told moaic about."""
    return x * 2


@twice.register_fake
def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _derivative(_: Any, grad: Tensor) -> Tensor:
    return grad * 2


twice.register_autograd(_derivative)


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="moai", options={"compile": False})


def leaves(device: str, *values: Tensor) -> list[Tensor]:
    return [value.detach().clone().to(device).requires_grad_() for value in values]


def assert_like_plain(function: Callable[..., Tensor], *values: Tensor) -> None:
    ours, theirs = leaves("moai", *values), leaves("cpu", *values)
    run = compiled(function)
    for _ in range(2):
        result, expected = run(*ours), function(*theirs)
        torch.testing.assert_close(result.detach().cpu(), expected.detach())
        result.square().sum().backward()
        expected.square().sum().backward()
        for our, their in zip(ours, theirs, strict=True):
            torch.testing.assert_close(our.grad, their.grad, check_device=False)


def an_op_of_a_library(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(twice(x) @ w) * x.exp()


def exponential(x: Tensor) -> Tensor:
    return twice(x).exp()


def behind_a_checkpoint(x: Tensor, w: Tensor) -> Tensor:
    def inside(x: Tensor, w: Tensor) -> Tensor:
        return twice(x @ w).sin()

    return cast("Tensor", checkpoint(inside, x, w, use_reentrant=False)) * w


def numbers_that_depend_on_the_plan(x: Tensor, w: Tensor) -> Tensor:
    return torch.poisson(x.detach() * 0) + x @ w


def memory_in_an_order_of_its_own(x: Tensor, w: Tensor) -> Tensor:
    y = x * 1
    windows = y.as_strided((3, 4), (2, 1))
    y.as_strided((2,), (3,)).add_(w[0, :2])
    return windows * 2


@pytest.mark.parametrize(
    "function",
    [
        an_op_of_a_library,
        behind_a_checkpoint,
        numbers_that_depend_on_the_plan,
        memory_in_an_order_of_its_own,
    ],
)
def test_values_and_gradients(function: Callable[..., Tensor], caplog: pytest.LogCaptureFixture) -> None:
    assert_like_plain(function, torch.randn(4, 4), torch.randn(4, 4))
    (warned,) = [record for record in caplog.records if "op by op" in record.message]
    assert "test_op_by_op.py" in warned.message or "as_strided" in warned.message


def test_buffers_and_gradients_over_batches_of_any_size() -> None:
    plain = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    ours = deepcopy(plain).to("moai")

    def step(x: Tensor) -> Tensor:
        return twice(ours(x))

    run = compiled(step)
    for rows in (4, 5, 7):
        batch = torch.randn(rows, 6)
        run(batch.to("moai")).square().mean().backward()
        (plain(batch) * 2).square().mean().backward()
    for our, their in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(our.grad, their.grad, check_device=False, atol=1e-5, rtol=1e-4)
    for our, their in zip(ours.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(our, their, check_device=False)


def test_an_argument_that_the_call_writes_is_kept_as_it_was() -> None:
    def step(count: Tensor, x: Tensor) -> Tensor:
        y = twice(x) * count.clone()
        count.add_(1)
        return y

    x = torch.randn(4)
    (ours,), (theirs,) = leaves("moai", x), leaves("cpu", x)
    our_count, their_count = torch.ones(4, device="moai"), torch.ones(4)
    run = compiled(step)
    for _ in range(2):
        run(our_count, ours).sum().backward()
        step(their_count, theirs).sum().backward()
    assert torch.equal(our_count.cpu(), their_count)
    torch.testing.assert_close(ours.grad, theirs.grad, check_device=False)


def test_a_view_of_an_input_that_is_written_after_a_break_reaches_it() -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        view = x[1:].t()
        graph_break()
        with torch.no_grad():
            view.mul_(2)
        return x * y

    x, (y,) = torch.randn(4, 6), leaves("cpu", torch.randn(4, 6))
    ours, (our_y,) = x.to("moai"), leaves("moai", y)
    compiled(step)(ours, our_y).sum().backward()
    step(x, y).sum().backward()
    assert torch.equal(ours.cpu(), x)
    torch.testing.assert_close(our_y.grad, y.grad, check_device=False)


def test_backward_twice_and_a_write_in_between() -> None:
    (x,) = leaves("moai", torch.randn(4))
    result = compiled(exponential)(x)
    loss = result.sum()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 4 * result.detach())
    with torch.no_grad():
        result.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_a_forward_kept_dies_with_its_graph() -> None:
    (x,) = leaves("moai", torch.randn(4))
    result = compiled(exponential)(x)
    returned = weakref.ref(result)
    del result
    gc.collect()
    assert returned() is None


def test_a_model_on_the_host_stays_there() -> None:
    (x,) = leaves("cpu", torch.randn(4))
    result = compiled(exponential)(x)
    result.sum().backward()
    assert result.device == torch.device("cpu")
    torch.testing.assert_close(x.grad, 2 * result.detach())


def test_autocast_holds_once() -> None:
    layer = nn.Linear(8, 8).to("moai")
    x = torch.randn(4, 8, device="moai")

    def step(x: Tensor) -> Tensor:
        return twice(layer(x))

    with torch.autocast("moai", torch.bfloat16):
        ours, theirs = compiled(step)(x), step(x)
    torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)
    (our_grad,) = torch.autograd.grad(ours.float().sum(), layer.weight)
    (their_grad,) = torch.autograd.grad(theirs.float().sum(), layer.weight)
    torch.testing.assert_close(our_grad, their_grad, atol=2e-2, rtol=2e-2)


class Momentum(nn.Module):
    """One encoder follows another, in memory that each step replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.fast = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.slow = deepcopy(self.fast).requires_grad_(requires_grad=False)

    @torch.no_grad()
    def update(self) -> None:
        for fast, slow in zip(self.fast.parameters(), self.slow.parameters(), strict=True):
            slow.data = slow.data * 0.5 + fast.data * 0.5

    def forward(self, x: Tensor) -> Tensor:
        self.update()
        with torch.no_grad():
            target = self.slow(x)
        return (self.fast(x) - 2 * target).square().sum()


def test_memory_that_a_call_replaces_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    theirs = Momentum()
    ours = deepcopy(theirs).to("moai")
    run = compiled(ours)
    x = torch.randn(3, 4)
    for _ in range(3):
        found, expected = run(x.to("moai")), theirs(x)
        torch.testing.assert_close(found.cpu(), expected)
        for model, loss in (ours, found), (theirs, expected):
            loss.backward()
            torch.optim.SGD(model.fast.parameters(), lr=0.1).step()
    torch.testing.assert_close(dict(ours.cpu().state_dict()), dict(theirs.state_dict()))
    (warning,) = [line for line in caplog.messages if "assigns the `.data` of a tensor" in line]
    assert warning.startswith("test_op_by_op.py:")


def test_a_model_whose_call_replaces_memory_is_not_taken_in_parts() -> None:
    with pytest.raises(Diagnostic, match=r"test_op_by_op.py:\d+ assigns the `.data` of a tensor"):
        take_call(Momentum(), {"x": torch.ones(3, 4)})
