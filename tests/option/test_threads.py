"""Several threads train at once: what belongs together runs without the others in between."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moaic.runtime.controller import session
from moaic.runtime.controller.deferred_forward import DeferredForward

# Dynamo silences warnings of its own by the filters of the process, which threads set and restore in any order.
pytestmark = [pytest.mark.usefixtures("mode"), pytest.mark.filterwarnings("ignore")]

MODELS = 3


def test_a_forward_waits_for_the_backward_of_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = nn.Linear(4, 2).cuda(), nn.Linear(4, 2).cuda()
    x = torch.randn(3, 4).cuda()
    wanted = second(x).sum().item()
    loss = first(x).sum()
    found: list[Tensor] = []
    other = threading.Thread(target=lambda: found.append(second(x).sum()))
    writes: Callable[[DeferredForward], Any] = DeferredForward.writes

    def writes_meanwhile(forward: DeferredForward) -> Any:
        if forward.done and not other.ident:
            other.start()
            other.join(0.5)
            assert not found, "the other forward is deferred while this one is being fulfilled"
        return writes(forward)

    monkeypatch.setattr(DeferredForward, "writes", writes_meanwhile)
    loss.backward()
    other.join()
    assert session.accelerator().pending is not None
    # Would come before the forward if that were not pending.
    with torch.no_grad():
        second.weight.zero_()
    assert found[0].item() == pytest.approx(wanted)


def test_first_calls_of_threads_compile_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    compiling: list[int] = []
    compile_: Callable[..., Any] = vars(torch)["compile"]

    def compile_alone(*args: Any, **options: Any) -> Any:
        assert not compiling
        compiling.append(1)
        time.sleep(0.05)
        compiling.pop()
        return compile_(*args, **options)

    monkeypatch.setattr(torch, "compile", compile_alone)
    models = [nn.Linear(4, 2).cuda() for _ in range(MODELS)]
    with ThreadPoolExecutor(MODELS) as threads:
        running = [threads.submit(model, torch.ones(1, 4).cuda()) for model in models]
    assert [[*each.result().shape] for each in running] == [[1, 2]] * MODELS


def test_each_thread_trains_as_alone() -> None:
    def trained(model: nn.Module, device: str) -> float:
        x = torch.linspace(-1, 1, 32).view(8, 4).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loss = torch.zeros(())
        for _ in range(5):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()

    def net(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    wanted = [trained(net(seed), "cpu") for seed in range(MODELS)]
    models = [net(seed).cuda() for seed in range(MODELS)]
    with ThreadPoolExecutor(MODELS) as threads:
        running = [threads.submit(trained, model, "cuda") for model in models]
    assert [each.result() for each in running] == pytest.approx(wanted, rel=1e-5)
