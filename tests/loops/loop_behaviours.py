"""What loops do around their steps: averages of weights, losses and logs of their own, errors, checkpoints."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.optim import swa_utils as averages
from torch.optim.swa_utils import AveragedModel

from tests.exact.training import Call, norm
from tests.loops.behaviour_parts import adamw, device_of, lists, loss_at, present
from tests.loops.compare import Found, weights
from tests.loops.tiny import TINY, loss_of

swa_utils: Any = averages


def average(model: nn.Module, call: Call) -> Found:
    """Three ways to keep a moving average, and what it says."""
    optimizer = adamw(model)
    by_hand, said = copy.deepcopy(model), list[Tensor]()
    by_list = [p.detach().clone() for p in model.parameters()]
    swa = AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    mean = AveragedModel(model)
    for step in range(3):
        loss_at(call, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for kept, p in zip(by_hand.parameters(), model.parameters(), strict=True):
                kept.lerp_(p, 0.1)
            lists._foreach_lerp_(by_list, list(model.parameters()), 0.1)
        swa.update_parameters(model)
        mean.update_parameters(model)
        batch = {name: tensor.to(device_of(model)) for name, tensor in TINY.batch(step).items()}
        said += [kept(**batch).loss.detach() for kept in (by_hand, swa, mean)]
    return [*said, *weights(by_hand), *by_list, *weights(swa), *weights(mean), *weights(model)]


def put_the_average_in(model: nn.Module, call: Call) -> Found:
    """Evaluate with averaged weights, then go on with the model's own."""
    optimizer, kept = adamw(model), copy.deepcopy(model)
    found: list[Tensor] = []
    for step in range(3):
        loss_at(call, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mine, p in zip(kept.parameters(), model.parameters(), strict=True):
                mine.lerp_(p, 0.1)
            own = copy.deepcopy(model.state_dict())
            model.load_state_dict(kept.state_dict())
            found.append(loss_at(call, 9))
            model.load_state_dict(own)
    return [*found, *weights(model)]


def loss_outside(model: nn.Module, call: Call) -> Found:
    optimizer = adamw(model)
    losses: list[Tensor] = []
    for step in range(3):
        batch = TINY.batch(step)
        logits: Tensor = call(ids=batch["ids"]).logits
        loss = loss_of(logits, batch["labels"].to(logits.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *weights(model)]


def read_everything(model: nn.Module, call: Call) -> Found:
    """Numbers for a log, read at every step in the middle of it."""
    optimizer = adamw(model)
    log: list[float] = []
    for step in range(3):
        answer = call(**TINY.batch(step))
        log.append(answer.loss.item())
        answer.loss.backward()
        log.append((answer.logits.argmax(-1).cpu() == TINY.batch(step)["labels"]).float().mean().item())
        log.append(norm(parameters_to_vector(model.parameters())))
        log += [float(grad.abs().max()) for grad in present(model)]
        assert not any(grad.isnan().any() for grad in present(model))
        optimizer.step()
        optimizer.zero_grad()
    return [torch.tensor(log), *weights(model)]


class BrokenError(Exception):
    """Something of the person's goes wrong."""


def interrupt(model: nn.Module, call: Call) -> Found:
    """In a module, in the loss, in the backward, in a hook after it, in the optimizer; steps follow."""

    def fail(*_: Any) -> Any:
        raise BrokenError

    optimizer: Any = adamw(model)
    hookable: dict[str, Any] = dict(model.named_parameters())
    found: list[Tensor] = []
    for step in range(5):
        handle: Any = None
        try:
            if step == 0:
                handle = optimizer.register_step_pre_hook(fail)
            if step == 1:
                handle = hookable["down.weight"].register_hook(fail)
            if step == 2:
                handle = hookable["up.weight"].register_post_accumulate_grad_hook(fail)
            loss = loss_at(call, step)
            if step == 3:
                loss.register_hook(fail)
            if step == 4:
                fail()
            loss.backward()
            optimizer.step()
        except BrokenError:
            found.append(torch.tensor(step))
        if handle is not None:
            handle.remove()
        model.zero_grad()
        loss_at(call, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(found) == 5
    return [*found, *weights(model)]


def save_and_load(model: nn.Module, call: Call) -> Found:
    """A step, saved; another, undone; then one more with an optimizer of the same state."""
    optimizer = adamw(model)
    loss_at(call, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    loss_at(call, 1).backward()
    optimizer.step()
    optimizer.zero_grad()
    file.seek(0)
    state = torch.load(file, map_location="cpu")
    model.load_state_dict(state["model"])
    again = adamw(model)
    again.load_state_dict(state["optimizer"])
    loss_at(call, 2).backward()
    again.step()
    again.zero_grad()
    return [*weights(model), *(state["model"].values())]
