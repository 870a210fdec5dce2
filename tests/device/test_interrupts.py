"""Ctrl-C at any moment of a program that uses the device: one KeyboardInterrupt, and the program can go on."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moaic import interrupts

MOAI = "moai"

SIGNALS = 150


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Python drops what is raised as it collects garbage: in PyTorch's timer, or as an earlier test's module dies."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_each_in_a_loop_of_ops_arrives() -> None:
    """Many of them while C++ makes a result that has a gradient, where an exception would end the process."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(MOAI), torch.ones(8, 8, device=MOAI)
    model(x).sum().backward()
    is_ready, arrived, until = threading.Event(), 0, time.monotonic() + 60

    def send() -> None:
        for _ in range(SIGNALS):
            is_ready.wait(20)
            is_ready.clear()
            time.sleep(random.uniform(0.002, 0.02))
            os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    while arrived < SIGNALS and time.monotonic() < until:
        try:
            is_ready.set()
            while time.monotonic() < until:
                model(x).sum().backward()
        except KeyboardInterrupt:
            arrived += 1
    assert arrived == SIGNALS
    assert model(x).isfinite().all()


def test_a_handler_that_is_set_in_backward_stays() -> None:
    x = torch.ones(3, device=MOAI, requires_grad=True)
    before = signal.getsignal(signal.SIGINT)

    def ignore(grad: Tensor) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    y = x * 2
    y.register_hook(ignore)
    try:
        y.sum().backward()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def _guard(file: str, name: str) -> Callable[[], bool]:
    """A guard of Dynamo, in the middle of which Ctrl-C is pressed."""
    made: dict[str, Any] = {"sys": sys, "interrupt": interrupts.interrupt}
    text = f"def called(): interrupt(2, sys._getframe())\ndef {name}():\n    called()\n    return True"
    exec(compile(text, file, "exec"), made)
    return made[name]


@pytest.mark.parametrize(("file", "name"), [("/lib/torch/_dynamo/guards.py", "fn"), ("<string>", "guard")])
def test_one_in_a_guard_of_dynamo_waits_for_the_guard(file: str, name: str) -> None:
    guard, answer = _guard(file, name), False
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it comes with the call after the guard's
        answer = guard()
        len("")
    assert answer
    assert sys.getprofile() is None


def test_one_elsewhere_is_raised_at_once() -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupts.interrupt(signal.SIGINT, None)
