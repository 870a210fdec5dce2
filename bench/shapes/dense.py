"""Scripts with small dense networks: losses, optimizers and loops of every kind."""

from __future__ import annotations

import copy
import io
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import swa_utils

STEPS = 30


def mlp(*widths: int) -> nn.Sequential:
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def early_stopping_and_resume(device: str) -> Iterator[float]:
    """Trains until the held-out loss rises, saves, and goes on from the file in a new model."""
    x, y = torch.randn(256, 32), torch.randint(10, (256,))
    model = mlp(32, 128, 10).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    file = io.BytesIO()
    best, patience = float("inf"), 3
    for step in range(STEPS):
        rows = slice(64 * (step % 3), 64 * (step % 3) + 64)
        loss = F.cross_entropy(model(x[rows].to(device)), y[rows].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()
        if step % 5 == 4:
            with torch.no_grad():
                held_out = F.cross_entropy(model(x[192:].to(device)), y[192:].to(device)).item()
            if held_out < best:
                best = held_out
                file = io.BytesIO()
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            elif (patience := patience - 1) == 0:
                break
    file.seek(0)
    kept = torch.load(file, map_location=device)
    model = mlp(32, 128, 10).to(device)
    model.load_state_dict(kept["model"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.load_state_dict(kept["optimizer"])
    for _ in range(5):
        loss = F.cross_entropy(model(x[:64].to(device)), y[:64].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def policy_gradient(device: str) -> Iterator[float]:
    """REINFORCE: every episode has another length, so every batch has another number of rows."""
    policy = mlp(4, 64, 2).to(device)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    dice = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        length = int(torch.randint(10, 60, (1,), generator=dice))
        states = torch.randn(length, 4, generator=dice).to(device)
        actions = torch.randint(2, (length,), generator=dice).to(device)
        returns = torch.linspace(1, 0.1, length).to(device)
        log_probs = F.log_softmax(policy(states), dim=-1).gather(1, actions[:, None]).squeeze(1)
        loss = -(log_probs * returns).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        optimizer.step()
        yield loss.item()


def q_learning(device: str) -> Iterator[float]:
    """A replay buffer on the host, a target network that follows now and then, Huber loss."""
    online = mlp(6, 64, 64, 3).to(device)
    target = copy.deepcopy(online)
    optimizer = torch.optim.RMSprop(online.parameters(), lr=1e-3)
    replay: deque[tuple[Tensor, int, float, Tensor]] = deque(maxlen=500)
    dice = torch.Generator().manual_seed(2)
    for step in range(STEPS):
        for _ in range(16):
            state, after = torch.randn(2, 6, generator=dice)
            replay.append((state, int(torch.randint(3, (1,), generator=dice)), float(state[0]), after))
        chosen = [replay[int(i)] for i in torch.randint(len(replay), (32,), generator=dice)]
        states = torch.stack([each[0] for each in chosen]).to(device)
        actions = torch.tensor([each[1] for each in chosen]).to(device)
        rewards = torch.tensor([each[2] for each in chosen]).to(device)
        afters = torch.stack([each[3] for each in chosen]).to(device)
        with torch.no_grad():
            wanted = rewards + 0.9 * target(afters).max(dim=1).values
        loss = F.smooth_l1_loss(online(states).gather(1, actions[:, None]).squeeze(1), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            target.load_state_dict(online.state_dict())
        yield loss.item()


def contrastive_with_two_towers(device: str) -> Iterator[float]:
    """InfoNCE over all pairs of a batch, with a learned temperature."""
    left, right = mlp(32, 128, 64).to(device), mlp(48, 128, 64).to(device)
    scale = nn.Parameter(torch.tensor(2.0, device=device))
    optimizer = torch.optim.AdamW([*left.parameters(), *right.parameters(), scale], lr=1e-3)
    for _ in range(STEPS):
        a = F.normalize(left(torch.randn(64, 32).to(device)), dim=-1)
        b = F.normalize(right(torch.randn(64, 48).to(device)), dim=-1)
        logits = scale.exp() * a @ b.T
        labels = torch.arange(64, device=device)
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def triplets(device: str) -> Iterator[float]:
    """One network called three times in a step."""
    model = mlp(24, 96, 32).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True)
    for _ in range(STEPS):
        anchor, near, far = (model(torch.randn(48, 24).to(device)) for _ in range(3))
        loss = F.triplet_margin_loss(anchor, near, far)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        yield loss.item()


def distillation(device: str) -> Iterator[float]:
    """A frozen teacher, a student, two losses."""
    teacher, student = mlp(32, 256, 256, 10).to(device).eval(), mlp(32, 64, 10).to(device)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x, y = torch.randn(64, 32).to(device), torch.randint(10, (64,)).to(device)
        with torch.no_grad():
            soft = F.softmax(teacher(x) / 2, dim=-1)
        logits = student(x)
        loss = F.kl_div(F.log_softmax(logits / 2, dim=-1), soft, reduction="batchmean") + F.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def averaged_weights(device: str) -> Iterator[float]:
    """An exponential average of the weights, evaluated in the loop."""
    model = mlp(32, 128, 10).to(device)
    averages: Any = swa_utils
    average = averages.AveragedModel(model, multi_avg_fn=averages.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    held_out = torch.randn(32, 32).to(device)
    for step in range(STEPS):
        loss = F.cross_entropy(model(torch.randn(64, 32).to(device)), torch.randint(10, (64,)).to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        average.update_parameters(model)
        if step % 10 == 9:
            with torch.no_grad():
                yield average(held_out).square().mean().item()
        yield loss.item()


def second_order(device: str) -> Iterator[float]:
    """L-BFGS calls a closure as often as it wants."""
    model = mlp(16, 32, 1).to(device)
    x, y = torch.randn(64, 16).to(device), torch.randn(64, 1).to(device)
    optimizer: Any = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(10):
        yield float(optimizer.step(closure))


def graph_convolution(device: str) -> Iterator[float]:
    """Sums over the edges of a graph by index_add."""
    nodes, edges = 200, 1000
    features, labels = torch.randn(nodes, 32).to(device), torch.randint(5, (nodes,)).to(device)
    sources, targets = torch.randint(nodes, (2, edges)).to(device)
    first, second = nn.Linear(32, 64).to(device), nn.Linear(64, 5).to(device)
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=1e-2)
    for _ in range(STEPS):
        h = F.relu(first(torch.zeros_like(features).index_add(0, targets, features[sources])))
        logits = second(torch.zeros_like(h).index_add(0, targets, h[sources]))
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


SCRIPTS = (
    early_stopping_and_resume,
    policy_gradient,
    q_learning,
    contrastive_with_two_towers,
    triplets,
    distillation,
    averaged_weights,
    second_order,
    graph_convolution,
)
