"""Attention by ring exchange: each rank of an axis has a block of the rows, and blocks of keys go round among them.

An instruction, as it communicates. Its operands and results are those of the attention that it replaces, all of them
cut along the sequence into blocks of one order; the columns of a mask stay whole. A block has rows that
stand together, or, with `stripes = n`, every n-th row: then a causal flag leaves every rank as much to do in every turn
(Brandon et al., Striped Attention, 2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from moaic.ir.attention import ATTENTION, is_causal, query_key_value
from moaic.ir.graph import Op
from moaic.ir.op_names import RING, RING_BACKWARD, SDPA, SDPA_BACKWARD
from moaic.ir.rules import Rule, Strategy, rule_from_text

RINGS: Final[Mapping[str, str]] = {SDPA: RING, SDPA_BACKWARD: RING_BACKWARD}
"""Ring by the op that it replaces."""

_ATTENTION: Final = {ring: op for op, ring in RINGS.items()}

_RULES: Final[Mapping[str, tuple[str, str]]] = {
    SDPA: ("b h Q d!, b h K d!, b h K e!", "b h Q e!, b h Q"),
    SDPA_BACKWARD: ("b h Q e!, b h Q d!, b h K d!, b h K e!, b h Q e!, b h Q", "b h Q d!, b h K d!, b h K e!"),
}
"""Operands but for a mask, and results; `Q` are rows and `K` keys in blocks."""

_BLOCKS: Final[Mapping[str, str]] = {"Q": "(s q!)", "K": "(s k!)"}
_STRIPES: Final[Mapping[str, str]] = {"Q": "(q! s)", "K": "(k! s)"}

_MASK: Final = ("b", "h", "Q", "m!")


def is_ring(op: Op) -> bool:
    return op.name in _ATTENTION


def is_striped(op: Op) -> bool:
    return "stripes" in op.attrs


def is_balanced(op: Op) -> bool:
    """Whether all ranks of a ring have equal work."""
    return is_striped(op) or not is_causal(op)


def attention_of(op: Op) -> Op:
    """The attention op that a ring replaces."""
    attrs = {name: attr for name, attr in op.attrs.items() if name not in ("axis", "stripes")}
    return replace(op, name=_ATTENTION[op.name], attrs=attrs)


def _plain(op: Op) -> str:
    """Name of the attention op: that of `op`, or of the op that a ring replaces."""
    return _ATTENTION.get(op.name, op.name)


def why_not(op: Op, blocks: int) -> str:
    """Reason why attention does not divide into so many blocks; empty where it does."""
    query, key, _ = query_key_value(op)
    rows, columns = query.type.shape[2], key.type.shape[2]
    if blocks < 2:
        return "one rank is no ring"
    if not rows or not columns or rows % blocks or columns % blocks:
        return f"{rows} rows and {columns} keys do not fall into {blocks} blocks each"
    if is_causal(op) and rows != columns:
        return f"causal attention in blocks takes as many keys as rows, not {columns} for {rows}"
    if any(not value.type.shape for value in op.inputs()):
        return "a mask without dims has no columns: `aten.view` to size [1, 1] gives it some"
    return ""


def rings_for(op: Op, ranks: int, axis: str = "") -> dict[Strategy, Op]:
    """Rings over an axis of so many ranks that can replace an op, by the strategy of each."""
    if op.name not in RINGS or why_not(op, ranks) or any(v.type.layout.on_dim(2) for v in query_key_value(op)):
        return {}
    blocks = replace(op, name=RINGS[op.name], attrs={**op.attrs, "axis": axis})
    stripes = replace(blocks, attrs={**blocks.attrs, "stripes": ranks})
    return {around(ring, ranks): ring for ring in (stripes, blocks)}


def around(op: Op, ranks: int) -> Strategy:
    """States of the values of a ring of so many ranks on its axis."""
    strategy = _rule(op, ranks).by_factor("s", 1, ranks)
    assert strategy is not None
    return strategy


def ring_rule(op: Op) -> Rule:
    """The rule of a ring, its blocks as many as the layout of its keys says: no other axis splits the sequence."""
    _, key, _ = query_key_value(op)
    split = key.type.layout.split_of(str(op.attrs["axis"]))
    assert split is not None, f"{op.name} goes round over an axis that does not split its keys"
    stripes = op.attrs.get("stripes")
    return _rule(op, stripes if isinstance(stripes, int) else key.type.shape[2] // split.stride)


def _rule(op: Op, blocks: int) -> Rule:
    query, key, _ = query_key_value(op)
    sizes = {"s": blocks, "q": query.type.shape[2] // blocks, "k": key.type.shape[2] // blocks}
    operands, results = _RULES[_plain(op)]
    inputs = [value.type for value in op.inputs()]
    if len(inputs) > ATTENTION[_plain(op)]:
        operands = f"{operands}, {' '.join(_MASK[4 - len(inputs[-1].shape) :])}"
    text = f"{operands} -> {results}"
    for dim, factors in (_STRIPES if is_striped(op) else _BLOCKS).items():
        text = text.replace(dim, factors)
    return rule_from_text(
        text,
        inputs,
        [value.type for value in op.results],
        sizes={name: size for name, size in sizes.items() if size != 1},
    )
