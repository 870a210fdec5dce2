"""Assertions about values in compiled functions: a failed one raises PyTorch's error, and the program continues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

pytestmark = pytest.mark.filterwarnings("ignore")  # of Dynamo, about itself

ATEN: Any = torch.ops.aten
LINALG: Any = torch.linalg

Options = dict[str, Any]
BOTH: Options = {"dp": 2, "micro_batches": 2, "compile": False}
PLANS: tuple[Options, ...] = ({"compile": False}, {"dp": 2, "compile": False}, {"micro_batches": 2, "compile": False})
BUILT: Options = {"dp": 2, "compile": "wait"}

ROWS = 8


def classes(x: Tensor, ids: Tensor) -> Tensor:
    return x[:, :1] * functional.one_hot(ids, 10)


def negative_classes(x: Tensor, ids: Tensor) -> Tensor:
    return classes(x, -ids)


def factors(x: Tensor, ids: Tensor) -> Tensor:
    one = torch.eye(4, dtype=x.dtype, device=x.device)
    return LINALG.cholesky(one * (11 - ids)[:, None, None] + x[:, :, None] * x[:, None]).sum(-1)


def solutions(x: Tensor, ids: Tensor) -> Tensor:
    one = torch.eye(4, dtype=x.dtype, device=x.device)
    return LINALG.solve(one * (12 - ids)[:, None, None], x)


def inverses(x: Tensor, ids: Tensor) -> Tensor:
    one = torch.eye(4, dtype=x.dtype, device=x.device)
    return LINALG.inv(one * (12 - ids)[:, None, None]) @ x[:, :, None]


def apart(x: Tensor, ids: Tensor) -> Tensor:
    """Of what nothing else is made."""
    ATEN._assert_async.msg((ids.square() < 100).all(), "not all are small")
    return x.square()


def of_one_number(x: Tensor, ids: Tensor) -> Tensor:
    ATEN._assert_async.msg(ids.max() < 12, "the largest is large")
    ATEN._assert_async(ids.min() < 12)
    ATEN._assert_async.msg(~(ids > 11).any(), "one is large")
    return x.square()


def without_words(x: Tensor, ids: Tensor) -> Tensor:
    torch._assert_async((ids < 12).all())  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    return x.square()


Form = Callable[[Tensor, Tensor], Tensor]

FORMS: dict[Form, str] = {
    classes: "Class values must be smaller than num_classes",
    negative_classes: "Class values must be non-negative",
    factors: "linalg.cholesky: .*not positive-definite",
    solutions: "linalg.solve: .*singular",
    inverses: "linalg.inv: .*singular",
    apart: "not all are small",
    of_one_number: "is large",
    without_words: "single nonzero value, but got zero",
}


class Around(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.before = nn.Linear(4, 4).double()

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.form(self.before(x), ids).square().sum() / ROWS


def step(run: Callable[..., Tensor], model: nn.Module, x: Tensor, ids: Tensor) -> list[Tensor]:
    """The loss and the gradients."""
    model.zero_grad()
    loss = run(x, ids)
    loss.backward()
    return [loss.detach().cpu(), *(each.grad.cpu() for each in model.parameters() if each.grad is not None)]


@pytest.mark.parametrize(
    ("form", "options"),
    [
        *((form, BOTH) for form in FORMS),
        *((classes, plan) for plan in (*PLANS, BUILT)),
        *(pytest.param(form, plan, marks=pytest.mark.exact) for form in FORMS for plan in (*PLANS, BUILT)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_check_is_raised_with_its_words_and_later_steps_go_on(form: Form, options: Options) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    model, x, good = Around(form), torch.randn(ROWS, 4).double(), torch.arange(ROWS)
    if form is negative_classes:
        good = torch.zeros_like(good)
    expected = step(model, model, x, good)
    model = model.to("moai")
    run: Any = torch.compile(model, backend="moai", fullgraph=True, options=options)
    bad = good.clone()
    bad[-2] = 12
    for _ in range(2):
        torch.testing.assert_close(step(run, model, x.to("moai"), good.to("moai")), expected)
        with pytest.raises(RuntimeError, match=FORMS[form]):
            step(run, model, x.to("moai"), bad.to("moai"))
        assert (torch.ones(3, device="moai") + 1).sum().item() == 6
    with torch.no_grad(), pytest.raises(RuntimeError, match=FORMS[form]):
        run(x.to("moai"), bad.to("moai")).item()
    torch.testing.assert_close(step(run, model, x.to("moai"), good.to("moai")), expected)


def looked_up(x: Tensor, ids: Tensor) -> Tensor:
    return functional.embedding(ids, x)


def counted(x: Tensor, ids: Tensor) -> Tensor:
    return functional.cross_entropy(x, ids)


def divided(x: Tensor, ids: Tensor) -> Tensor:
    return torch.div(x.long(), 8 - ids, rounding_mode="trunc")


KERNELS: dict[Form, tuple[type[Exception], str]] = {
    looked_up: (IndexError, "index out of range: one is negative, or not below 4\n"),
    counted: (IndexError, "index out of range: one is negative, or not below 4\n"),
    divided: (RuntimeError, "^ZeroDivisionError\n"),
}


@pytest.mark.parametrize("form", KERNELS, ids=lambda form: form.__name__)
def test_a_compiled_kernel_fails_as_the_op_does(form: Form) -> None:
    torch.compiler.reset()
    kind, words = KERNELS[form]
    run: Any = torch.compile(form, backend="moai", options={"compile": "wait"})
    x, good, bad = torch.arange(16.0).view(4, 4) - 7, torch.tensor([3, 0, 1, 2]), torch.tensor([3, 0, 8, 2])
    assert torch.equal(run(x.to("moai"), good.to("moai")).cpu(), form(x, good))
    with pytest.raises(kind, match=words):
        run(x.to("moai"), bad.to("moai")).cpu()
    assert (torch.ones(3, device="moai") + 1).sum().item() == 6


@pytest.mark.parametrize("other", [-3, 0, 2.5])
def test_compiled_quotients_by_a_number_are_those_of_the_op(other: float) -> None:
    def quotients(x: Tensor) -> Tensor:
        return torch.div(x, other, rounding_mode="trunc")

    torch.compiler.reset()
    run: Any = torch.compile(quotients, backend="moai", options={"compile": "wait"})
    x = torch.arange(-9, 9)
    if other:
        assert torch.equal(run(x.to("moai")).cpu(), quotients(x))
    else:
        with pytest.raises(RuntimeError, match=r"^ZeroDivisionError\n"):
            run(x.to("moai")).cpu()


def test_a_backward_may_be_all_that_checks() -> None:
    """That of eigenvalues solves a system."""

    def spread(x: Tensor) -> Tensor:
        return LINALG.eig(x)[1].abs().sum() + LINALG.eigvals(x).abs().sum()

    torch.compiler.reset()
    run: Any = torch.compile(spread, backend="moai", options={"compile": False})
    ours, theirs = (torch.arange(9.0).view(3, 3).cos().to(device).requires_grad_() for device in ("moai", "cpu"))
    run(ours).backward()
    spread(theirs).backward()
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad.cpu(), theirs.grad)
