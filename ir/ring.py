"""Attention by ring exchange: each rank of an axis has a block of the rows, and blocks of keys go round among them.

An instruction, as data travels in its middle. Its operands and results are those of the attention that it stands for,
all of them cut along the sequence into blocks of one order; the columns of a mask stay whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from moaic.ir.graph import Op, Value
from moaic.ir.rules import Rule, Strategy, rule_from_text

RING: Final = "moai.ring_sdpa"
RING_BACKWARD: Final = "moai.ring_sdpa_backward"

RINGS: Final[Mapping[str, str]] = {"moai.sdpa": RING, "moai.sdpa_backward": RING_BACKWARD}
"""By the op that a ring stands for."""

_ATTENTION: Final = {ring: op for op, ring in RINGS.items()}

_RULES: Final[Mapping[str, tuple[str, str]]] = {
    "moai.sdpa": ("b h (s q!) d!, b h (s k!) d!, b h (s k!) e!", "b h (s q!) e!, b h (s q!)"),
    "moai.sdpa_backward": (
        "b h (s q!) e!, b h (s q!) d!, b h (s k!) d!, b h (s k!) e!, b h (s q!) e!, b h (s q!)",
        "b h (s q!) d!, b h (s k!) d!, b h (s k!) e!",
    ),
}
"""Operands but for a mask, and results; `s` are the blocks."""

OPERANDS: Final[Mapping[str, int]] = {name: operands.count(",") + 1 for name, (operands, _) in _RULES.items()}
"""Of attention, how many there are without a mask."""

_MASK: Final = ("b", "h", "(s q!)", "m!")


def is_ring(op: Op) -> bool:
    return op.name in _ATTENTION


def in_ring(op: Op, axis: str) -> Op:
    """The ring over `axis` that stands for attention."""
    return replace(op, name=RINGS[op.name], attrs={**op.attrs, "axis": axis})


def attention_of(op: Op) -> Op:
    """The attention for which a ring stands."""
    return replace(op, name=_ATTENTION[op.name], attrs={k: v for k, v in op.attrs.items() if k != "axis"})


def query_at(op: Op) -> int:
    """Which operand of attention the query is, in either direction, in a ring or not: key and value come next."""
    return 1 if _plain(op) == "moai.sdpa_backward" else 0


def query_key_value(op: Op) -> tuple[Value, Value, Value]:
    query, key, value = list(op.inputs())[query_at(op) : query_at(op) + 3]
    return query, key, value


def _plain(op: Op) -> str:
    """The name of the attention that an op is, or for which it stands."""
    return _ATTENTION.get(op.name, op.name)


def why_not(op: Op, blocks: int) -> str:
    """Why attention does not fall into so many blocks; nothing where it does."""
    query, key, _ = query_key_value(op)
    rows, columns = query.type.shape[2], key.type.shape[2]
    if blocks < 2:
        return "one rank is no ring"
    if not rows or not columns or rows % blocks or columns % blocks:
        return f"{rows} rows and {columns} keys do not fall into {blocks} blocks each"
    if op.attrs.get("is_causal", False) and rows != columns:
        return f"causal attention in blocks takes as many keys as rows, not {columns} for {rows}"
    return ""


def ring_strategy(op: Op, ranks: int) -> Strategy | None:
    """How the values of an op lie in a ring of so many ranks that stands for it; None where there can be none."""
    if op.name not in RINGS or why_not(op, ranks):
        return None
    is_cut = any(value.type.layout.on_dim(2) for value in query_key_value(op))
    return None if is_cut else around(op, ranks)


def around(op: Op, ranks: int) -> Strategy:
    """How the values of a ring of so many ranks lie on its axis."""
    strategy = ring_rule(op, ranks).by_factor("s", 1, ranks)
    assert strategy is not None
    return strategy


def ring_rule(op: Op, blocks: int) -> Rule:
    """The rule of a ring, given its blocks: no other axis splits the sequence."""
    query, key, _ = query_key_value(op)
    sizes = {"s": blocks, "q": query.type.shape[2] // blocks, "k": key.type.shape[2] // blocks}
    operands, results = _RULES[_plain(op)]
    inputs = [value.type for value in op.inputs()]
    if len(inputs) > OPERANDS[_plain(op)]:
        operands = f"{operands}, {' '.join(_MASK[4 - len(inputs[-1].shape) :])}"
    return rule_from_text(
        f"{operands} -> {results}",
        inputs,
        [value.type for value in op.results],
        sizes={name: size for name, size in sizes.items() if size != 1},
    )


def blocks_of(op: Op) -> int:
    """Blocks into which a ring is cut, as the layout of its keys says."""
    _, key, _ = query_key_value(op)
    split = key.type.layout.split_of(str(op.attrs["axis"]))
    assert split is not None, f"{op.name} goes round over an axis that does not split its keys"
    return key.type.shape[2] // split.stride
