"""Optimizer state and memory traffic per element of a parameter. The optimizer is not in the graph; Adam is assumed."""

from __future__ import annotations

STATES = 2
"""Optimizer state per element, in the parameter's type: the two moments."""

COPIES = 2 + STATES
"""Persistent values per element: the parameter, its gradient and the two moments."""

VALUE_PASSES = 3
"""Reads and writes of a step: the parameter is read and written, its gradient read."""

STATE_PASSES = 2 * STATES
"""Each state is read and written."""
