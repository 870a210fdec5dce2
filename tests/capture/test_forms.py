"""Common code between matrix products: captured as in PyTorch, with a rule for every op, exact when sharded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moaic.capture.trace_only import take_call
from moaic.check.proof import CapturedStep, Proof, ProofOutcome, plans_of, step_of
from moaic.check.workers import with_tangent_of_loss_alone
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Role
from moaic.ir.ops import OPS
from moaic.planner.request import parse_request
from moaic.runtime.interpreter import run_function

ROWS, LENGTH, WIDTH = 4, 6, 8

FFT: Any = torch.fft
LINALG: Any = torch.linalg
ATEN: Any = torch.ops.aten

Form = Callable[[Tensor, Tensor], Tensor]
"""Of activations, and of a vector of a parameter."""


def turned_pairs(x: Tensor, token: Tensor) -> Tensor:
    """Rotary positions of GPT-J, GLM and Cohere: even and odd elements change places."""
    return x + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def every_third(x: Tensor, token: Tensor) -> Tensor:
    """Of a dim that has no whole number of runs, from its middle."""
    return x[..., 1::3] * x[..., 2:8:3].sum(1, keepdim=True)[..., :1] + x[:, ::4].sum(1, keepdim=True)[..., :3]


def turned_numbers(x: Tensor, token: Tensor) -> Tensor:
    """Rotary positions of Llama 4 and DeepSeek-V2: pairs of elements are complex numbers."""
    angles = torch.outer(torch.arange(LENGTH, dtype=x.dtype), token[: WIDTH // 2])
    turns = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[None] + pairs.conj() / 2).flatten(-2)


def overlapping_windows(x: Tensor, token: Tensor) -> Tensor:
    """Longformer's and LED's, by strides: whole windows that begin within each other, of both kinds."""
    padded = torch.nn.functional.pad(x, (0, 0, 1, 1))
    rows, length, width = padded.shape
    wide = padded.as_strided((rows, 3, 4, width), (length * width, 2 * width, width, 1))
    halves = x.reshape(rows, 3, 2, width)
    near = halves.as_strided((rows, 5, 2, width), (halves.stride(0), halves.stride(1) // 2, *halves.stride()[2:]))
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)
    near = near + turned.as_strided((rows, 5, 2, width), (turned.stride(0), 1, 1, turned.stride(2)))
    return wide.sum(2) * token + near.sum(1)[:, :1] * x.unfold(1, 3, 2).sum((1, 3))[:, None]


def solved_systems(x: Tensor, token: Tensor) -> Tensor:
    """Gated delta rules of Qwen3-Next: a triangle for each chunk of each row; its determinant and factors besides."""
    pairs = x.view(ROWS, LENGTH, 2, 4)
    square = pairs.mT @ pairs + torch.eye(4, dtype=x.dtype)
    solved: Tensor = LINALG.solve_triangular(square.tril(), square * token[:4], upper=False)
    factors: tuple[Tensor, Tensor] = LINALG.qr(square)
    return solved + factors[0] * factors[1] + torch.logdet(square)[..., None, None]


def transformed(x: Tensor, token: Tensor) -> Tensor:
    """FNet mixes tokens by Fourier transforms."""
    whole: Tensor = FFT.fftn(x, dim=(1, 2))
    half: Tensor = FFT.rfft(x * token, dim=1)
    return whole.real + half.abs().sum(1, keepdim=True)


def checked_values(x: Tensor, token: Tensor) -> Tensor:
    """Classes as rows of zeros and one; factors that exist or not; something that nothing else is made of."""
    classes = torch.nn.functional.one_hot(x.detach().argmax(-1), WIDTH + 2)[..., :WIDTH]
    ATEN._assert_async.msg((token.abs() < 2).all() & (x < 1e9).all(), "too large")
    ATEN._assert_async.msg(~(x.square() > 1e9).any(), "too large")
    pairs = x.view(ROWS, LENGTH, 2, 4)
    square = pairs.mT @ pairs + torch.eye(4, dtype=x.dtype)
    factors: Tensor = LINALG.cholesky(square) + LINALG.inv(square) + LINALG.solve(square, square * token[:4])
    vectors: Tensor = LINALG.solve(square, x[..., :4])
    return x * classes * token + factors.sum((-1, -2))[..., None] + vectors.sum(-1, keepdim=True)


def hidden(x: Tensor) -> Tensor:
    """Whether an element of a row is hidden: more or fewer in every row."""
    return x.detach()[..., 0] > 0.05


def masked_tokens(x: Tensor, token: Tensor) -> Tensor:
    """Wav2vec2's: the vector that is written is learned."""
    x = x.clone()
    x[hidden(x)] = token
    return x


def pictures_among_words(x: Tensor, token: Tensor) -> Tensor:
    """LLaVA's: a feature for each place that a mask leaves, in their order; of the last features none is left."""
    places = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH, 1) % 3 == 1
    features = torch.outer(torch.arange(ROWS * LENGTH - 4, dtype=x.dtype), token)
    return x.masked_scatter(places.expand_as(x), features)


def masked_elements(x: Tensor, token: Tensor) -> Tensor:
    """By numbers and by slices, between other dims, of all dims; not a value for each true element."""
    x = x.clone()
    x[x.detach() > 0.5] = 0.5
    x[:, token.detach()[:LENGTH] > 0] = token[:1]
    x[hidden(x), 2:4] = token[2:4] * 2
    x[hidden(x), ...] = x.new_zeros(1, 1)
    x[..., token.detach() > 0] = x[:, :1, :1] * 3
    return x * 2


def last_tokens(x: Tensor, token: Tensor) -> Tensor:
    """What classifies a row, by its last token that is no padding; from the end where there is none."""
    rows = torch.arange(ROWS)
    last = (x.detach()[..., 0] > 0.05).sum(-1) - 1
    return x[rows, last] * token + x.reshape(ROWS, -1)[rows, last * 2][:, None]


def pooled(x: Tensor, token: Tensor) -> Tensor:
    """Swin's: a mean of each row; and what was laid out otherwise is written as a whole, by strides."""
    mean = torch.flatten(torch.nn.functional.adaptive_avg_pool1d(x.transpose(1, 2), 1), 1) * token
    written = ATEN.as_strided_scatter(x.new_zeros(x.numel()), x * token, x.shape, (LENGTH * WIDTH, WIDTH, 1)).view(
        x.shape
    )
    return mean[:, None] + written


def nothing_much(x: Tensor, token: Tensor) -> Tensor:
    """Layers of no width, as configurations may ask for."""
    none = (x[..., :0] * token[:0]).view(ROWS * LENGTH, 0) @ x.new_zeros(0, WIDTH)
    empty = x[..., :0].view(ROWS, LENGTH, 2, 0).sum(-1).sum(-1, keepdim=True)
    return x * token + none.view(ROWS, LENGTH, WIDTH) + empty


EVERY: tuple[Form, ...] = (
    turned_pairs,
    every_third,
    turned_numbers,
    overlapping_windows,
    solved_systems,
    transformed,
    checked_values,
    masked_tokens,
    pictures_among_words,
    masked_elements,
    last_tokens,
    pooled,
    nothing_much,
)

FORMS: Mapping[str, Form] = {form.__name__: form for form in EVERY}

PLANS = {"dp=2": 2, "micro_batches=2": 1, "dp=2,micro_batches=2": 2}
"""And for how many ranks."""


class Around(nn.Module):
    """A form between two layers, and a loss of every row."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.before = nn.Linear(WIDTH, WIDTH)
        self.after = nn.Linear(WIDTH, 4 * WIDTH)
        self.token = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        found = self.form(self.after(torch.tanh(self.before(x)))[..., :WIDTH], self.token)
        return found.square().sum() / (ROWS * LENGTH)


@pytest.fixture(params=FORMS)
def name(request: pytest.FixtureRequest) -> str:
    torch.compiler.reset()
    return request.param


def captured(name: str) -> tuple[CapturedStep, dict[str, Tensor]]:
    """The step around a form, and what plain PyTorch makes of it in the same floating type."""
    torch.manual_seed(0)
    model, x = Around(FORMS[name]).double(), torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64)
    step = with_tangent_of_loss_alone(step_of(take_call(model, {"x": x})))
    loss = model(x)
    loss.backward()
    found = {label: parameter.grad for label, parameter in model.named_parameters() if parameter.grad is not None}
    return step, {**found, "loss": loss.detach()}


def test_a_form_is_captured_as_it_is_and_splits(name: str) -> None:
    step, expected = captured(name)
    main = step.module.main
    assert {op.name for op in main.ops} <= set(OPS)
    for index, result in enumerate(run_function(step.module, main.name, step.inputs)):
        torch.testing.assert_close(result, expected[_label(main.result_role(index))], rtol=1e-10, atol=1e-12)
    proof = Proof(step)
    for plan, ranks in PLANS.items():
        (config, *_) = plans_of(step.module, ranks, parse_request(plan))
        verdict = proof.verdict(config)
        assert verdict.outcome is ProofOutcome.PASS, verdict


def _label(role: Role) -> str:
    return role.label if role.kind == "grad" else "loss"


class Row(nn.Module):
    """One row, looked up by a number that has no dims."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.embedding(torch.tensor(2), self.before(x)).sum()


@pytest.mark.parametrize("plan", PLANS)
def test_one_row_is_looked_up_in_a_batch_that_is_split(plan: str) -> None:
    torch.compiler.reset()
    step = with_tangent_of_loss_alone(step_of(take_call(Row(), {"x": torch.randn(ROWS, WIDTH).double()})))
    (config, *_) = plans_of(step.module, PLANS[plan], parse_request(plan))
    verdict = Proof(step).verdict(config)
    assert verdict.outcome is ProofOutcome.PASS, verdict


class Forgetful(nn.Module):
    """Attention with dropout, of vectors: its graph has no attention and no tokens, only their softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, 3 * WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        heads = self.before(x).view(ROWS, LENGTH, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        found = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, dropout_p=0.25)
        return found.square().sum()


def test_attention_with_dropout_is_split_along_the_sequence() -> None:
    torch.compiler.reset()
    step = with_tangent_of_loss_alone(step_of(take_call(Forgetful(), {"x": torch.randn(ROWS, LENGTH, WIDTH).double()})))
    (config, *_) = plans_of(step.module, 2, parse_request("cp=2"))
    verdict = Proof(step).verdict(config)
    assert verdict.outcome is ProofOutcome.PASS, verdict


def test_windows_that_somebody_writes_through_are_refused() -> None:
    """A look-up would be a copy: what is written to one would be lost in the other."""

    def through_windows(x: Tensor) -> Tensor:
        y = x * 1
        y.as_strided((2, 3), (4, 1)).mul_(2)
        return y

    def before_windows_are_read(x: Tensor) -> Tensor:
        y = x * 1
        windows = y.as_strided((3, 4), (2, 1))
        y[0] = 1
        return windows

    for function in (through_windows, before_windows_are_read):
        torch.compiler.reset()
        with pytest.raises(Diagnostic, match="in an order of its own"):
            take_call(function, {"x": torch.ones(4, 4)})
