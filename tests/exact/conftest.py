"""Real workers, two of them, for all tests of this folder."""

from __future__ import annotations

import os

from moaic.device.autoload import register

os.environ.setdefault("MOAI_FLAVOR", "2")
os.environ.setdefault("MOAI_LOG", "warning")
register()
