"""What an optimizer keeps and moves per element of a parameter. It is not in the graph, and taken to be Adam."""

from __future__ import annotations

STATES = 2
"""Values of the parameter's own type that are kept: the two moments."""

COPIES = 2 + STATES
"""Values per element at rest: the parameter, its gradient and the states."""

VALUE_PASSES = 3
"""Reads and writes of a step: the parameter is read and written, its gradient read."""

STATE_PASSES = 2 * STATES
"""Each state is read and written."""
