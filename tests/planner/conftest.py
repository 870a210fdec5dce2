from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def small_tensors(one_thread: None) -> None:
    """All that are computed with here."""
