"""Random numbers of captured models: drawn from one key, and distributed as those of PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.capture.compiler import WARNINGS, Compiler
from tests.capture.models import gpt2, text

pytestmark = WARNINGS


def test_dropout_draws_from_one_key(compiler: Compiler) -> None:
    model = gpt2(0.5)
    loss = compiler(model)(**text()).loss
    again = compiler(model)(**text()).loss
    loss.backward()
    assert loss.isfinite()
    assert again.isfinite()
    function = compiler.function(0)
    assert function.param_roles[-1].kind == "key"
    folds = [op for op in function.ops if op.name == "moai.fold_key"]
    assert [op.attrs["instance"] for op in folds] == list(range(len(folds)))
    assert len(folds) == 1 + 2 * 3
    assert all(op.loc.module == "" for op in folds)
    assert not [op.name for op in function.ops if "rand" in op.name and op.name != "moai.rand"]


def test_dropout_keeps_its_share_and_scales_it(compiler: Compiler) -> None:
    x = torch.ones(64, 1024, requires_grad=True)
    y = compiler(nn.Dropout(0.25))(x)
    y.sum().backward()
    assert y.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert y.mean().item() == pytest.approx(1, abs=0.02)
    torch.testing.assert_close(x.grad, y)


def test_random_tensors(compiler: Compiler) -> None:
    def draw(x: Tensor) -> tuple[Tensor, ...]:
        return (
            torch.empty_like(x).uniform_(-3, 5),
            torch.randn_like(x),
            torch.rand(512, 8),
            torch.randint(3, 7, (512,)),
            torch.bernoulli(torch.full_like(x, 0.2)),
        )

    spread, normal, uniform, whole, coin = compiler(draw)(torch.zeros(1 << 14))
    assert spread.min() >= -3
    assert spread.max() < 5
    assert spread.mean().item() == pytest.approx(1, abs=0.1)
    assert normal.mean().item() == pytest.approx(0, abs=0.05)
    assert normal.std().item() == pytest.approx(1, abs=0.05)
    assert uniform.mean().item() == pytest.approx(0.5, abs=0.05)
    assert set(whole.tolist()) == {3, 4, 5, 6}
    assert coin.mean().item() == pytest.approx(0.2, abs=0.02)


def test_distributions_are_those_of_pytorch(compiler: Compiler) -> None:
    """Their cumulative shares at a few places; what is exponential is never zero, nor is the number of tries."""

    def draw(x: Tensor) -> tuple[Tensor, ...]:
        return (
            torch.empty_like(x).exponential_(2.0),
            torch.empty_like(x).geometric_(0.3),
            torch.empty_like(x).cauchy_(1.0, 2.0),
            torch.empty_like(x).log_normal_(0.5, 0.25),
            torch.empty_like(x).normal_(3.0, 2.0),
        )

    torch.manual_seed(0)
    ours, theirs = compiler(draw)(torch.zeros(1 << 16)), draw(torch.zeros(1 << 16))
    for found, expected in zip(ours, theirs, strict=True):
        places = expected.quantile(torch.tensor([0.1, 0.5, 0.9]))
        share, wanted = ((each[:, None] <= places).float().mean(0) for each in (found, expected))
        torch.testing.assert_close(share, wanted, atol=0.01, rtol=0)
        assert found.dtype == expected.dtype
        assert not found.isnan().any()
    assert ours[0].min() > 0
    assert ours[1].min() == 1


def test_orders_are_permutations_and_each_as_likely(compiler: Compiler) -> None:
    def draw(x: Tensor) -> Tensor:
        return torch.stack([torch.randperm(3) for _ in range(len(x))])

    torch.manual_seed(0)
    orders = compiler(draw)(torch.zeros(240))
    assert orders.dtype == torch.int64
    assert torch.equal(orders.sort(1).values, torch.arange(3).expand(240, 3))
    _, counts = orders.unique(dim=0, return_counts=True)
    assert len(counts) == 6
    assert counts.min() > 20


def test_slopes_of_a_random_relu_are_drawn_once(compiler: Compiler) -> None:
    x = torch.full((1 << 12,), -1.0, requires_grad=True)
    y = compiler(nn.RReLU(0.1, 0.3))(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, -y.detach())
    assert y.max() <= -0.1
    assert y.min() >= -0.3
    assert y.mean().item() == pytest.approx(-0.2, abs=0.01)
    assert torch.equal(compiler(nn.RReLU().eval())(x), nn.RReLU().eval()(x))


def test_random_numbers_of_another_kind_are_refused(compiler: Compiler) -> None:
    def draw(x: Tensor) -> Tensor:
        return torch.poisson(x) * x

    with pytest.raises(Exception, match="would depend on the plan"):
        compiler(draw)(torch.ones(4))
