"""Names of moaic's own ops, each written once. Ops of PyTorch go by their overload: `aten.mm`, `aten.sum.dim_IntList`.

The text of the IR spells these names, so a name is never changed.
"""

from __future__ import annotations

from typing import Final

# Collectives along one axis of the mesh.
ALL_REDUCE: Final = "moai.all_reduce"
ALL_GATHER: Final = "moai.all_gather"
REDUCE_SCATTER: Final = "moai.reduce_scatter"
ALL_TO_ALL: Final = "moai.all_to_all"
SHARD: Final = "moai.shard"
FIRST: Final = "moai.first"
RING: Final = "moai.ring_sdpa"
RING_BACKWARD: Final = "moai.ring_sdpa_backward"

SEND: Final = "moai.send"
"""Brings a value from its owner rank on an axis to another rank of that axis."""

# Instructions on what one rank holds.
PART: Final = "moai.part"
JOIN: Final = "moai.join"
ACCUMULATE: Final = "moai.accumulate"
"""Adds one more term to a sum, between compiled functions."""

# Ops inside compiled functions.
ADD_TO: Final = "moai.add_to"
"""Adds to a sum inside a compiled function: the first operand is the sum."""

REPEAT_LAST: Final = "moai.repeat_last"
"""Makes the dim `dim` as long as that of its result, by copies of the last element along it."""

SDPA: Final = "moai.sdpa"
SDPA_BACKWARD: Final = "moai.sdpa_backward"
GROUPED_MM: Final = "moai.grouped_mm"
GROUPED_OUTER: Final = "moai.grouped_outer"

RECURRENT: Final = "moai.recurrent"
RECURRENT_BACKWARD: Final = "moai.recurrent_backward"
"""A stack of LSTM, GRU or plain recurrent layers, and its gradients: see `ir/ops/recurrent.py`."""

SCALED_MM: Final = "moai.scaled_mm"
"""A product of eight-bit float matrices: `(left @ right) * left_scale * right_scale`, in the type `dtype`.

A scale has one element, or one for each row of the left and each column of the right matrix.
"""

CHECKED: Final = "moai.checked"
"""The first operand, provided that the second holds; otherwise an error with the text of `message` is raised.

The second operand is bools, which must all be true, or error codes of linear algebra routines (i32), which must all be
zero; then `message` is the name of the routine, and PyTorch says what each code means.
"""

FOLD_KEY: Final = "moai.fold_key"
RAND: Final = "moai.rand"
