"""A device for the tests of a module: two workers, started once."""

from __future__ import annotations

import pytest

from moaic.runtime.controller.accelerator import Accelerator
from tests.runtime.controller.eager_device import Device


@pytest.fixture(scope="module")
def device(two: Accelerator) -> Device:
    return Device(two)
