"""Error codes of routines for matrices, whose check PyTorch drops from a graph before 2.13: it has no result."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, Final

CHECK: Final = "aten::_linalg_check_errors"


@cache
def keep_checks() -> None:
    """Have AOTAutograd keep them in order, as later versions of PyTorch do by themselves."""
    effects: Any = import_module("torch._higher_order_ops.effects")
    # Its register takes each op once, and what it knows by itself is to stay.
    if effects._get_effect(CHECK) is None:
        effects._register_effectful_op(CHECK, effects._EffectType.ORDERED)
