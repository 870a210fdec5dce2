"""Real workers, two of them, for all tests of this folder."""

from __future__ import annotations

import os

import torch  # noqa: F401  (first: it loads the device itself)

from moaic.device.autoload import register

os.environ.setdefault("MOAI_FLAVOR", "2")
os.environ.setdefault("MOAI_LOG", "warning")
register()
