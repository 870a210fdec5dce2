"""Eager training on the device: autograd, optimizers, mixed precision, attention, and layers with state."""

from __future__ import annotations

import copy
import os
import signal
import threading
from collections.abc import Callable
from operator import methodcaller
from typing import Any, cast

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from moaic.device.guard import Guard

pytestmark = pytest.mark.usefixtures("accelerator")

MOAI = "moai"
attention: Any = F.scaled_dot_product_attention
checkpoint: Any = getattr(torch.utils.checkpoint, "checkpoint")  # noqa: B009 untyped


def gradients(device: str, make: Callable[[], nn.Module], *inputs: Tensor) -> list[Tensor]:
    """Output and gradients of a module of given weights."""
    torch.manual_seed(0)
    module = make().to(device)
    torch.manual_seed(1)
    results: Any = module(*(x.to(device) for x in inputs))
    out = cast("Tensor", results[0] if type(results) is tuple else results)
    (out * out).sum().backward()
    return [out.detach().cpu(), *(p.grad.cpu() for p in module.parameters() if p.grad is not None)]


def close(expected: list[Tensor], found: list[Tensor], atol: float = 1e-5) -> None:
    assert len(expected) == len(found)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, atol=atol, rtol=1e-5)


MODULES: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.LayerNorm(5), nn.Linear(5, 2)), (3, 4)),
    (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)), (2, 3, 8, 8)),
    (lambda: nn.LSTM(4, 5, num_layers=2, bidirectional=True), (6, 3, 4)),
    (lambda: nn.GRU(4, 5, batch_first=True), (3, 6, 4)),
    (lambda: nn.RNN(4, 5), (6, 3, 4)),
    (lambda: nn.LSTM(4, 5, bias=False), (6, 3, 4)),
    (lambda: nn.GRU(4, 5, bias=False), (6, 3, 4)),
    (lambda: nn.LSTMCell(4, 5), (3, 4)),
    (lambda: nn.GRUCell(4, 5), (3, 4)),
    (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0), (2, 5, 8)),
    (lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Softmax(-1)), (3, 4)),
    (lambda: nn.GroupNorm(2, 4), (3, 4, 5)),
]


@pytest.mark.parametrize(("make", "shape"), MODULES)
def test_modules_equal_the_cpu(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    close(gradients("cpu", make, x), gradients(MOAI, make, x))


def test_batch_norm_keeps_its_statistics() -> None:
    expected: Any = nn.BatchNorm1d(3)
    ours = copy.deepcopy(expected).to(MOAI)
    for mode in (True, True, False):
        x = torch.randn(5, 3)
        expected.train(mode)
        ours.train(mode)
        torch.testing.assert_close(ours(x.to(MOAI)).cpu(), expected(x))
    torch.testing.assert_close(ours.running_var.cpu(), expected.running_var)
    assert ours.num_batches_tracked.item() == 2


def test_packed_sequences() -> None:
    def run(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        module = nn.LSTM(3, 4, batch_first=True).to(device)
        packed = nn.utils.rnn.pack_padded_sequence(torch.ones(2, 5, 3, device=device), [5, 3], batch_first=True)
        out, _ = nn.utils.rnn.pad_packed_sequence(module(packed)[0], batch_first=True)
        (out * out).sum().backward()
        return [out.detach().cpu(), *(p.grad.cpu() for p in module.parameters() if p.grad is not None)]

    close(run("cpu"), run(MOAI))


def test_second_derivatives() -> None:
    x = torch.tensor([1.0, 2.0], device=MOAI, requires_grad=True)
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert second.tolist() == [6, 12]


def test_what_a_hook_raises_arrives_whatever_the_thread_was_told() -> None:
    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    made = torch.ones(2, device=MOAI, requires_grad=True) * 2
    made.register_hook(fail)
    with torch.autograd.set_multithreading_enabled(mode=True), pytest.raises(ZeroDivisionError):
        made.sum().backward()


@pytest.mark.parametrize("error", [AttributeError, SystemError])
@pytest.mark.parametrize("device", ["cpu", MOAI])
def test_what_a_hook_raises_is_what_arrives(device: str, error: type[Exception]) -> None:
    """A SystemError, too, which is also what Python makes of a failure without an error; and one of C alone."""

    def fail(_: Tensor) -> None:
        raise error("absent")

    made = torch.ones(2, device=device, requires_grad=True) * 2
    made.register_hook(fail if error is SystemError else methodcaller("absent"))
    with pytest.raises(error, match="absent"):
        made.sum().backward()


class Stop(torch.autograd.Function):
    """Lets no gradient through, not even zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        return None


def attended(x: Tensor) -> Tensor:
    return attention(x[None, None], x[None, None], x[None, None])[0, 0]


def remembered(x: Tensor) -> Tensor:
    cell = nn.LSTMCell(4, 4).to(x.device)
    return cell(x)[0]


@pytest.mark.parametrize("op", [attended, remembered])
@pytest.mark.parametrize("device", ["cpu", MOAI])
def test_where_no_gradient_comes_back_none_is_made(op: Callable[[Tensor], Tensor], device: str) -> None:
    x = torch.ones(4, 4, device=device, requires_grad=True)
    stopped = cast("Callable[[Tensor], Tensor]", Stop.apply)
    stopped(op(x)).sum().backward()
    assert x.grad is None


def test_functorch() -> None:
    def square(x: Tensor) -> Tensor:
        return (x * x).sum()

    functorch: Any = torch.func
    assert functorch.grad(square)(torch.ones(3, device=MOAI)).tolist() == [2, 2, 2]
    assert functorch.vmap(square)(torch.ones(3, 2, device=MOAI)).tolist() == [2, 2, 2]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_replay_dropout(reentrant: bool) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)).to(MOAI)
    found: list[Tensor] = []
    for checkpointed in (True, False):
        x = torch.ones(3, 4, device=MOAI, requires_grad=True)
        torch.manual_seed(0)
        out = checkpoint(module, x, use_reentrant=reentrant) if checkpointed else module(x)
        out.sum().backward()
        assert x.grad is not None
        found.append(x.grad.cpu())
    torch.testing.assert_close(found[0], found[1])


OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {}),
    ("AdamW", {"fused": True}),
    ("AdamW", {"foreach": False}),
    ("AdamW", {"capturable": True}),
    ("Adam", {"amsgrad": True}),
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("SGD", {"fused": True}),
    ("Adagrad", {}),
    ("RMSprop", {"momentum": 0.5}),
    ("Adafactor", {}),
    ("LBFGS", {}),
]


@pytest.mark.parametrize(("name", "settings"), OPTIMIZERS)
def test_optimizers_equal_the_cpu(name: str, settings: dict[str, Any]) -> None:
    def run(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1)).to(device)
        x = torch.ones(7, 5, device=device)
        mine = {} if device == "cpu" and "capturable" in settings else settings
        optimizer = getattr(torch.optim, name)(module.parameters(), lr=0.01, **mine)

        def step() -> Tensor:
            optimizer.zero_grad()
            loss = module(x).pow(2).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            return loss

        for _ in range(3):
            optimizer.step(step)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return [p.detach().cpu() for p in module.parameters()]

    close(run("cpu"), run(MOAI), atol=1e-6)


def test_accumulation_over_two_backward_calls() -> None:
    module = nn.Linear(3, 1).to(MOAI)
    for _ in range(2):
        (module(torch.ones(2, 3, device=MOAI)).sum() / 2).backward()
    assert module.weight.grad is not None
    assert module.weight.grad.tolist() == [[2, 2, 2]]
    module.zero_grad(set_to_none=False)
    assert module.weight.grad.tolist() == [[0, 0, 0]]


def test_autocast() -> None:
    module = nn.Linear(8, 8).to(MOAI)
    x = torch.randn(4, 8).to(MOAI)
    with torch.autocast(MOAI, dtype=torch.bfloat16):
        y = module(x)
        assert y.dtype == torch.bfloat16
        assert F.layer_norm(y, (8,)).dtype == torch.float32
        assert y.softmax(-1).dtype == torch.float32
        assert (y + x).dtype == torch.float32
        assert torch.addcmul(x, y, y).dtype == torch.float32
        assert torch.addcmul(y, y, y).dtype == torch.bfloat16
        loss = F.mse_loss(y, x)
        assert loss.dtype == torch.float32
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(y.sigmoid(), x.sigmoid())
        with torch.autocast(MOAI, enabled=False):
            assert module(x).dtype == torch.float32
    loss.backward()
    assert module.weight.grad is not None
    assert module.weight.grad.dtype == torch.float32


def test_grad_scaler() -> None:
    module = nn.Linear(4, 1).to(MOAI)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(MOAI, init_scale=8.0)
    before = module.weight.detach().clone()
    scaler.scale(module(torch.ones(2, 4, device=MOAI)).sum()).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(module.parameters(), 100.0)
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(module.weight.cpu(), before.cpu() - 0.2)
    scaler.scale(module(torch.full((2, 4), float("inf"), device=MOAI)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0


MASKS: list[dict[str, Any]] = [
    {},
    {"is_causal": True},
    {"attn_mask": torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(0)) > 0.3},
    {"attn_mask": torch.linspace(-1, 1, 36).view(6, 6)},
    {"scale": 0.3},
    {"attn_mask": torch.zeros(2, 4, 6, 6, requires_grad=True)},
    {"dropout_p": 0.5},
]


@pytest.mark.parametrize("settings", MASKS)
def test_attention_equals_the_cpu(settings: dict[str, Any]) -> None:
    def run(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        qkv = [torch.randn(2, 4, 6, 8).to(device).requires_grad_() for _ in range(3)]
        there = {
            k: v.detach().to(device).requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v
            for k, v in settings.items()
        }
        out = attention(*qkv, **there)
        (out * out).sum().backward()
        return [out.detach().cpu(), *(x.grad.cpu() for x in qkv if x.grad is not None)]

    close(run("cpu"), run(MOAI), atol=1e-4)


def test_attention_of_what_does_not_fit_is_refused() -> None:
    for device in ("cpu", MOAI):
        query = torch.ones(1, 1, 2, 2, device=device)
        with pytest.raises(RuntimeError, match="to have the same dtype"):
            attention(query, query.double(), query)
        with pytest.raises(RuntimeError, match=r"must match|broadcast"):
            attention(query, query, query, torch.ones(3, 2, device=device))


def test_a_scaler_without_gradients_finds_nothing() -> None:
    for device in ("cpu", MOAI):
        found = torch.zeros(1, device=device)
        torch.ops.aten._amp_foreach_non_finite_check_and_unscale_([], found, torch.ones(1, device=device))
        assert found.item() == 0


QUANTIZED: list[Callable[[Tensor], Tensor]] = [
    lambda x: torch.fake_quantize_per_tensor_affine(x, 0.5, 0, -2, 3),
    lambda x: torch.fake_quantize_per_channel_affine(
        x, torch.tensor([0.5, 0.25], device=x.device), torch.zeros(2, dtype=torch.int32, device=x.device), 0, -2, 3
    ),
]


@pytest.mark.filterwarnings("ignore::moaic.device.cpu_fallback.HostWarning")
@pytest.mark.parametrize("quantize", QUANTIZED)
def test_training_for_quantization(quantize: Callable[[Tensor], Tensor]) -> None:
    found: list[list[Tensor]] = []
    for device in ("cpu", MOAI):
        x = torch.linspace(-2, 2, 8).view(2, 4).to(device).requires_grad_()
        out = quantize(x)
        out.square().sum().backward()
        assert x.grad is not None
        found.append([out.detach().cpu(), x.grad.cpu()])
    close(*found, atol=0)


def test_attention_with_fewer_key_heads_other_ranks_and_modes() -> None:
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    found = attention(q.to(MOAI), k.to(MOAI), k.to(MOAI), enable_gqa=True)
    torch.testing.assert_close(found.cpu(), attention(q, k, k, enable_gqa=True))
    found = attention(*(x[0].to(MOAI) for x in (k, k, k)))
    torch.testing.assert_close(found.cpu(), attention(k[0], k[0], k[0]))
    with torch.inference_mode():
        assert attention(*(k.to(MOAI) for _ in range(3))).shape == k.shape


def test_backward_in_several_threads() -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            x = torch.ones(8, 8, device=MOAI, requires_grad=True)
            for _ in range(10):
                (x @ x).sum().backward()
            assert x.grad is not None
            assert x.grad[0, 0].item() == 160
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_the_guard_has_no_dict() -> None:
    """PyTorch asks it for the device's type while an error is set: to look into a dict would fail, and abort."""
    assert not hasattr(Guard(), "__dict__")


def test_ctrl_c_in_a_backward_is_raised_after_it() -> None:
    """Where the engine asks for the device's type, an exception would abort the process."""

    def interrupt(grad: Tensor) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    x = torch.ones(3, device=MOAI, requires_grad=True)
    y = x * 2
    y.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 2]
