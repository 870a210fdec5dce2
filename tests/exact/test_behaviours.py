"""Common code around a compiled model has the effect that it has in plain PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from moaic.compile.planning import graph_mode
from moaic.compile.step_clock import STEPS, WARM_UP
from moaic.ir.errors import Diagnostic
from moaic.runtime.host.env_flags import GraphMode
from tests.exact.models import EXAMPLES, VOCABULARY
from tests.exact.training import PLANS, Call, Trainee, check, compiled

LLAMA = EXAMPLES["llama"]

Found = Sequence[Tensor]

Behaviour = Callable[[nn.Module, Call], Found]
"""Does something with a model and how it is called, and gives what came of it."""


def grads(model: nn.Module) -> list[Tensor]:
    found = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().cpu() for p in model.parameters()]


def accumulate(model: nn.Module, call: Call) -> Found:
    """Two batches, each for half of the gradient."""
    for seed in (1, 2):
        (call(**LLAMA.batch(seed)).loss / 2).backward()
    return grads(model)


def clip(model: nn.Module, call: Call) -> Found:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms: list[Tensor] = []
    for seed in (1, 2):
        call(**LLAMA.batch(seed)).loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.25))
        optimizer.step()
        optimizer.zero_grad()
    return [*norms, *weights(model)]


def halve(model: nn.Module, call: Call) -> Found:
    loss = call(**LLAMA.batch()).loss / 2
    loss.backward()
    return [loss.detach(), *grads(model)]


def read_first(model: nn.Module, call: Call) -> Found:
    loss = call(**LLAMA.batch()).loss
    value = loss.item()
    loss.backward()
    return [torch.tensor(value), *grads(model)]


def backward_twice(model: nn.Module, call: Call) -> Found:
    loss = call(**LLAMA.batch()).loss
    loss.backward(retain_graph=True)
    loss.backward()
    return grads(model)


def keep_logits(model: nn.Module, call: Call) -> Found:
    outputs = call(**LLAMA.batch())
    outputs.loss.backward()
    return [outputs.logits.detach(), *grads(model)]


def add_to_the_loss(model: nn.Module, call: Call) -> Found:
    """A penalty on the logits: both outputs have a gradient."""
    outputs = call(**LLAMA.batch())
    (outputs.loss + 1e-3 * outputs.logits.square().mean()).backward()
    return grads(model)


def loss_outside(model: nn.Module, call: Call) -> Found:
    batch = LLAMA.batch()
    labels = batch.pop("labels")
    logits = call(**batch).logits
    loss = cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1).to(logits.device))
    loss.backward()
    return [loss.detach(), *grads(model)]


def evaluate_between(model: nn.Module, call: Call) -> Found:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Tensor] = []
    for seed in (1, 2):
        call(**LLAMA.batch(seed)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            seen.append(call(**LLAMA.batch(3)).loss)
        model.train()
    return [*seen, *weights(model)]


def evaluate_a_rest(model: nn.Module, call: Call) -> Found:
    """The last batch of an evaluation, which no plan of more than one part divides."""
    call(**LLAMA.batch()).loss.backward()
    model.eval()
    with torch.no_grad():
        outputs = call(**LLAMA.batch(1, rows=3))
    model.train()
    return [outputs.loss, outputs.logits, *grads(model)]


def change_the_batch(model: nn.Module, call: Call) -> Found:
    """Also to a size that no plan of more than one part divides: the last of an epoch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[Tensor] = []
    for rows in (8, 4, 8, 12, 3):
        loss = call(**LLAMA.batch(rows, rows)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *weights(model)]


class BrokenError(Exception):
    """Something of the person's goes wrong."""


def interrupt(model: nn.Module, call: Call) -> Found:
    """After the forward, and within the backward; then train on."""

    def fail(_: Tensor) -> Tensor:
        raise BrokenError

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(3):
        loss = call(**LLAMA.batch(seed)).loss
        if seed == 0:
            loss.register_hook(fail)
        try:
            if seed == 1:
                fail(loss)
            loss.backward()
        except BrokenError:
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
    call(**LLAMA.batch(3)).loss.backward()
    return [*weights(model), *grads(model)]


def freeze(model: nn.Module, call: Call) -> Found:
    """Some parameters get no gradient; the others theirs."""
    frozen = [p for name, p in model.named_parameters() if "layers.0" in name]
    for p in frozen:
        p.requires_grad = False
    call(**LLAMA.batch()).loss.backward()
    for p in frozen:
        p.requires_grad = True
    return grads(model)


BEHAVIOURS: Mapping[str, Behaviour] = {
    behaviour.__name__: behaviour
    for behaviour in (
        accumulate,
        clip,
        halve,
        read_first,
        backward_twice,
        keep_logits,
        add_to_the_loss,
        loss_outside,
        evaluate_between,
        evaluate_a_rest,
        change_the_batch,
        interrupt,
        freeze,
    )
}


@pytest.fixture(scope="module")
def trainee() -> Trainee:
    torch.compiler.reset()
    return Trainee(LLAMA)


def same(found: Found, expected: Found, tolerance: float = 1e-5) -> None:
    check(numbered(found), numbered(expected), tolerance)


def numbered(tensors: Found) -> dict[str, Tensor]:
    return {f"result {index}, {list(tensor.shape)},": tensor for index, tensor in enumerate(tensors)}


@pytest.mark.parametrize("plan", [*(pytest.param(plan, marks=pytest.mark.exact) for plan in ("one", "use")), "dp2_mb2"])
@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_it_does_what_pytorch_does(trainee: Trainee, behaviour: str, plan: str) -> None:
    host = LLAMA.model()
    expected = BEHAVIOURS[behaviour](host, host)
    trainee.use(plan)
    same(BEHAVIOURS[behaviour](trainee.model, trainee.call), expected)


def train_two(models: Sequence[nn.Module], calls: Sequence[Call]) -> Found:
    """Two models, the second learning what the first says, each with its own optimizer; backward in either order."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(4):
        first, second = (call(**LLAMA.batch(step)) for call in calls)
        apart = (second.logits - first.logits.detach()).square().mean()
        losses = [first.loss, second.loss + 0.01 * apart]
        for loss in losses if step % 2 else reversed(losses):
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [weight for model in models for weight in weights(model)]


def test_two_models() -> None:
    torch.compiler.reset()
    hosts = [LLAMA.model(), EXAMPLES["qwen2"].model()]
    ours = [LLAMA.model().to("moai"), EXAMPLES["qwen2"].model().to("moai")]
    calls = [compiled(ours[0], PLANS["dp2"], compile=False), compiled(ours[1], PLANS["dp2_mb2"], compile=False)]
    same(train_two(ours, calls), train_two(hosts, hosts), 1e-4)


AUTOCAST_LOSS = 1e-3
AUTOCAST_GRADIENT = 2e-2
"""Distances from autocast on the host: bfloat16 has 8 bits, the same products are rounded in another order. Autocast
itself is some 1e-2 of a gradient's norm away from float32."""


@pytest.mark.parametrize("plan", [pytest.param("one", marks=pytest.mark.exact), "dp2_mb2"])
def test_autocast(plan: str) -> None:
    def autocast(device: str, call: Call) -> Call:
        def inside(**batch: Tensor) -> Any:
            with torch.autocast(device, dtype=torch.bfloat16):
                return call(**batch)

        return inside

    torch.compiler.reset()
    host, model = LLAMA.model(), LLAMA.model().to("moai")
    call = autocast("moai", compiled(model, PLANS[plan], compile=False))
    expected, found = halve(host, autocast("cpu", host)), halve(model, call)
    same(found[:1], expected[:1], AUTOCAST_LOSS)
    same(found[1:], expected[1:], AUTOCAST_GRADIENT)
    assert call(**LLAMA.batch()).logits.dtype == torch.bfloat16


def test_a_model_that_stays_on_the_host() -> None:
    torch.compiler.reset()
    host, model = LLAMA.model(), LLAMA.model()
    call = compiled(model, PLANS["dp2"], compile=False)
    for behaviour in (clip, evaluate_between):
        same(behaviour(model, call), behaviour(host, host))
    assert all(p.device.type == "cpu" for p in model.parameters())


@pytest.mark.parametrize("value", ["perhaps", 3])
def test_compile_is_yes_no_or_wait(value: object) -> None:
    with pytest.raises(Diagnostic, match=r"invalid value .* for compile"):
        compiled(nn.Linear(2, 2), {}, compile=value)


@pytest.mark.parametrize(
    ("options", "mode", "variable", "graphs"),
    [
        ({}, None, None, GraphMode.ALONE),
        ({"compile": "wait"}, None, None, GraphMode.ALONE),
        ({"compile": False}, None, None, GraphMode.NEVER),
        ({"compile": False, "cuda_graphs": True}, None, None, GraphMode.ALWAYS),
        ({}, None, "0", GraphMode.NEVER),
        ({}, None, "1", GraphMode.ALWAYS),
        ({}, None, "", GraphMode.ALONE),
        ({"cuda_graphs": None}, None, "1", GraphMode.ALWAYS),
        ({"cuda_graphs": False}, None, "1", GraphMode.NEVER),
        ({"cuda_graphs": True}, None, "0", GraphMode.ALWAYS),
        ({}, "reduce-overhead", "0", GraphMode.ALWAYS),
    ],
)
def test_which_steps_are_captured(
    options: Mapping[str, object],
    mode: str | None,
    variable: str | None,
    graphs: GraphMode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("MOAI_CUDA_GRAPHS", "MOAI_COMPILE"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv("MOAI_CUDA_GRAPHS", variable)
    assert graph_mode(options, mode) is graphs


@pytest.mark.parametrize("asked", [{"mode": "reduce-overhead"}, {"options": {"cuda_graphs": True}}])
def test_steps_may_be_recorded_where_devices_can(asked: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers on the CPU cannot, and nothing changes."""
    torch.compiler.reset()
    monkeypatch.setenv("MOAI_COMPILE", "0")
    host, model = LLAMA.model(), LLAMA.model().to("moai")
    call: Any = torch.compile(model, backend="moai", **asked)

    def there(**batch: Tensor) -> Any:
        return call(**{name: tensor.to("moai") for name, tensor in batch.items()})

    same(clip(model, there), clip(host, host))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"mode": "max-autotune"}, r"backend moai has no mode 'max-autotune'\n.*valid: default, reduce-overhead"),
        ({"options": {"dp": "x"}}, "dp=x is not a positive whole number"),
        ({"options": {"dp": 99}}, "dp=99 needs 99 workers"),
        ({"options": {"dq": 2}}, "there is no plan option `dq`"),
        ({"options": {"precision": "int3"}}, "invalid value `int3` for precision"),
        ({"options": "dp=2"}, "the options of torch.compile are 'dp=2', which is no dict"),
        ({"options": {"autotune": 0}}, "autotune=0 is not a positive whole number"),
        ({"options": {"expected_steps": 0}}, "expected_steps=0 is not a positive whole number"),
        ({"options": {"cuda_graphs": "perhaps"}}, r"invalid value `perhaps` for cuda_graphs\n.*choose True or False"),
    ],
)
def test_a_way_of_running_that_there_is_not_says_so_before_the_first_call(
    asked: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(Diagnostic, match=message):
        torch.compile(nn.Linear(2, 2).to("moai"), backend="moai", **asked)


def on_tensor(leaf: Tensor, loss: Tensor, hook: Callable[..., Any]) -> None:
    loss.register_hook(hook)


def on_leaf(leaf: Tensor, loss: Tensor, hook: Callable[..., Any]) -> None:
    leaf.register_post_accumulate_grad_hook(hook)


def on_node(leaf: Tensor, loss: Tensor, hook: Callable[..., Any]) -> None:
    assert loss.grad_fn is not None
    loss.grad_fn.register_hook(hook)


@pytest.mark.parametrize("place", [on_tensor, on_leaf, on_node])
def test_a_hook_may_raise(place: Callable[[Tensor, Tensor, Callable[..., Any]], None]) -> None:
    def fail(*_: Tensor) -> None:
        raise BrokenError

    leaf = torch.ones(3, device="moai", requires_grad=True)
    loss = (leaf.exp() * 2).sum()
    place(leaf, loss, fail)
    with pytest.raises(BrokenError) as raised:
        loss.backward()
    assert raised.traceback[-1].name == "fail"


def test_a_hook_that_copies_saved_tensors_is_an_error() -> None:
    layer = nn.Linear(8, 4).to("moai")
    call = torch.compile(layer, backend="moai", options={"dp": 1})
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.clone(), lambda saved: saved):
        output = call(torch.ones(2, 8, device="moai"))
    with pytest.raises(Diagnostic, match="a hook on saved tensors has put a copy"):
        output.sum().backward()


def test_plans_that_run_before_the_first_step_change_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`autotune` runs them on values of their own; steps are then timed, and told once."""
    torch.compiler.reset()
    for name, value in {"MOAI_LOG": "info", "MOAI_CACHE": "off", "MOAI_COMPILE": "0", "MOAI_AUTOTUNE": "2"}.items():
        monkeypatch.setenv(name, value)
    host, model = LLAMA.model(), LLAMA.model().to("moai")
    call: Any = torch.compile(model, backend="moai")

    def there(**batch: Tensor) -> Any:
        return call(**{name: tensor.to("moai") for name, tensor in batch.items()})

    with caplog.at_level(logging.INFO, "moaic"):
        same(clip(model, there), clip(host, host))
        assert sum(" were predicted." in line for line in caplog.messages) == 2
        for _ in range(WARM_UP + 2 * STEPS):
            there(**LLAMA.batch()).loss.backward()
    assert sum(line.startswith("Measured: a step takes ") for line in caplog.messages) == 1
