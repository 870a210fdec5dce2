"""The device's name, and whether the program uses the device."""

from __future__ import annotations

import threading
from typing import Any, Final

import torch

from moaic.device import torch_private

NAME: Final = torch_private.NAME

IN_USE: Final = threading.Event()
"""Set at the first use of the device; before, torch must behave as if moaic were not installed."""


def is_moai(device: Any) -> bool:
    """Whether an argument called `device` names the virtual accelerator."""
    if isinstance(device, str):
        return device.split(":", maxsplit=1)[0] == NAME
    return isinstance(device, torch.device) and device.type == NAME
