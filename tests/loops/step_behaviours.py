"""Ways to take a step: how gradients are summed, scaled, clipped and hooked, and what updates which parameters when."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.optim import SGD, AdamW, lr_scheduler

from tests.exact.training import Call
from tests.loops.behaviour_parts import adamw, device_of, lists, loss_at, present
from tests.loops.compare import Found, grads, weights


def accumulate(model: nn.Module, call: Call) -> Found:
    """Three batches to a step, the sum of their losses kept."""
    optimizer = adamw(model)
    total = torch.zeros((), device=device_of(model))
    for step in range(2):
        for part in range(3):
            loss = loss_at(call, 3 * step + part) / 3
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return [total, *weights(model)]


def scale(model: nn.Module, call: Call) -> Found:
    """A scaler that finds an overflow in its second step, skips that and grows again."""
    scaler = torch.amp.GradScaler(device_of(model), init_scale=1024.0, growth_interval=2)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scales: list[float] = []
    for step in range(5):
        loss = loss_at(call, step)
        scaler.scale(loss * float("inf") if step == 1 else loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return [torch.tensor(scales), *weights(model)]


def scale_fused(model: nn.Module, call: Call) -> Found:
    """The optimizer itself takes the scale and the overflow."""
    scaler = torch.amp.GradScaler(device_of(model), init_scale=1024.0)
    optimizer = adamw(model, fused=True)
    for step in range(3):
        loss = loss_at(call, step)
        scaler.scale(loss * float("inf") if step == 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [torch.tensor(scaler.get_scale()), *weights(model)]


def clip_norms(model: nn.Module, call: Call) -> Found:
    norms: list[Tensor] = []
    for kind in (2.0, 1.0, 3.0, float("inf")):
        for foreach in (True, False):
            loss_at(call, 1).backward()
            norms.append(clip_grad_norm_(model.parameters(), 0.3, norm_type=kind, foreach=foreach))
            norms.append(get_total_norm(present(model)))
            norms += grads(model)
    return norms


def clip_values(model: nn.Module, call: Call) -> Found:
    found: list[Tensor] = []
    for foreach in (True, False):
        loss_at(call, 1).backward()
        clip_grad_value_(model.parameters(), 1e-3, foreach=foreach)
        found += grads(model)
    return found


def schedule(model: nn.Module, call: Call) -> Found:
    """Warm-up, then a cosine; another optimizer is led by the loss."""
    optimizer, other = adamw(model), SGD([model.get_parameter("head.weight")], lr=0.3)
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, 4)
    plan = lr_scheduler.SequentialLR(optimizer, [warm, cosine], [2])
    plateau = lr_scheduler.ReduceLROnPlateau(other, factor=0.5, patience=0)
    rates: list[float] = []
    for step in range(5):
        loss = loss_at(call, step)
        loss.backward()
        optimizer.step()
        other.step()
        plan.step()
        plateau.step(loss.detach())
        model.zero_grad()
        rates += [optimizer.param_groups[0]["lr"], other.param_groups[0]["lr"]]
    return [torch.tensor(rates), *weights(model)]


def one_cycle(model: nn.Module, call: Call) -> Found:
    """Changes momenta too."""
    optimizer = adamw(model)
    plan = lr_scheduler.OneCycleLR(optimizer, 3e-2, total_steps=4)
    for step in range(4):
        loss_at(call, step).backward()
        optimizer.step()
        plan.step()
        optimizer.zero_grad()
    return weights(model)


def groups(model: nn.Module, call: Call) -> Found:
    """A group is added later."""
    layers = list(model.children())
    optimizer = AdamW(layers[0].parameters(), lr=1e-2, eps=1e-4)
    for step in range(3):
        loss_at(call, step).backward()
        optimizer.step()
        model.zero_grad()
        optimizer.add_param_group({"params": list(layers[step + 1].parameters()), "lr": 0.02, "weight_decay": step / 9})
    return weights(model)


def freeze(model: nn.Module, call: Call) -> Found:
    """A part that learns only later."""
    frozen = [p for name, p in model.named_parameters() if name.startswith(("up", "embed"))]
    optimizer = adamw(model)
    for step in range(4):
        for p in frozen:
            p.requires_grad = step >= 2
        loss_at(call, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def hook_gradients(model: nn.Module, call: Call) -> Found:
    """Gradients changed and watched as they come."""
    seen: dict[str, Tensor] = {}
    handles: list[Any] = []

    def change(grad: Tensor) -> Tensor:
        return grad * 2 + 1e-3

    def watch(name: str, grad: Tensor) -> None:
        seen[name] = grad.norm()

    for name, p in model.named_parameters():
        hooks: Any = (change, partial(watch, name))
        handles += [p.register_hook(hook) for hook in hooks]
    loss_at(call, 0).backward()
    for handle in handles:
        handle.remove()
    return [*(seen[name] for name in sorted(seen)), *grads(model)]


def step_in_backward(model: nn.Module, call: Call) -> Found:
    """Each parameter is updated when its gradient is there, and the gradient let go."""
    optimizers: dict[Tensor, AdamW] = {p: AdamW([p], lr=1e-2, eps=1e-4) for p in model.parameters()}

    def update(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    handles: list[Any] = [p.register_post_accumulate_grad_hook(update) for p in model.parameters()]
    for step in range(3):
        loss_at(call, step).backward()
    for handle in handles:
        handle.remove()
    return weights(model)


def two_optimizers(model: nn.Module, call: Call) -> Found:
    """One for matrices, one for the rest, each at its own pace."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    often, seldom = SGD(matrices, lr=0.1, momentum=0.9), AdamW(rest, lr=1e-2, eps=1e-4)
    for step in range(4):
        loss_at(call, step).backward()
        often.step()
        often.zero_grad()
        if step % 2:
            seldom.step()
            seldom.zero_grad()
    return weights(model)


def by_hand(model: nn.Module, call: Call) -> Found:
    """No optimizer at all; gradients asked for, changed in place, and applied."""
    for step in range(3):
        taken = torch.autograd.grad(loss_at(call, step), list(model.parameters()))
        with torch.no_grad():
            for p, grad in zip(model.parameters(), taken, strict=True):
                p -= 0.1 * grad  # noqa: PLW2901
        loss_at(call, step).backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad.data.mul_(0.5)
            p.data.add_(p.grad, alpha=-0.1)
            p.grad = None
    return weights(model)


def search_a_line(model: nn.Module, call: Call) -> Found:
    """An optimizer that runs the model as often as it likes."""
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, history_size=3)
    losses: list[Tensor] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_at(call, 1)
        loss.backward()
        losses.append(loss.detach())
        return loss

    for _ in range(2):
        optimizer.step(closure)
    model.zero_grad()
    return [*losses, *weights(model)]


def sharpness_aware(model: nn.Module, call: Call) -> Found:
    """Uphill, a gradient there, back, and down with it."""
    optimizer = SGD(model.parameters(), lr=0.1)
    for step in range(2):
        loss_at(call, step).backward()
        with torch.no_grad():
            length = torch.stack([grad.square().sum() for grad in present(model)]).sum().sqrt()
            moves = [grad * 0.05 / (length + 1e-12) for grad in present(model)]
            lists._foreach_add_(list(model.parameters()), moves)
        optimizer.zero_grad()
        loss_at(call, step).backward()
        with torch.no_grad():
            lists._foreach_sub_(list(model.parameters()), moves)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)
