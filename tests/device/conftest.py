"""Every test of the device runs twice: on a strict accelerator inside this process, and on two real workers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moaic.device import torch_module
from moaic.device.registration import register

sys.path.insert(0, str(Path(__file__).parent))

from engine import Engine

os.environ.setdefault("MOAI_FLAVOR", "2")
register()


@pytest.fixture(params=["strict", "workers"])
def accelerator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Which accelerator stands behind the device."""
    if request.param == "strict":
        engine = Engine()
        monkeypatch.setattr("moaic.runtime.controller.session.accelerator", lambda: engine)
    torch.manual_seed(0)
    torch_module.init()
    yield request.param
    torch_module.synchronize()
