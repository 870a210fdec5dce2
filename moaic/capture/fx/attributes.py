"""One spelling of an op's attributes per meaning: dims counted from the front, element types said."""

from __future__ import annotations

from collections.abc import Sequence

from moaic.ir.graph import Attr, Operand
from moaic.ir.types import TensorType
from moaic.runtime.protocol.aten_schema import ArgKind, Signature


def normalized(
    attrs: dict[str, Attr], operands: Sequence[Operand], types: Sequence[TensorType], signature: Signature
) -> dict[str, Attr]:
    """`attrs`, changed in place. An op that creates a tensor gets the element type of its result."""
    rank = _rank(operands)
    if rank is not None:
        for name in ("dim", "dims", "dim0", "dim1"):
            if name in attrs:
                attrs[name] = from_front(attrs[name], rank)
    if signature.nullary and ArgKind.DTYPE in signature.kinds:
        attrs["dtype"] = types[0].dtype
    return attrs


def _rank(operands: Sequence[Operand]) -> int | None:
    """The rank of the first tensor among the operands."""
    for operand in operands:
        first = next((value for value in operand if value is not None), None) if isinstance(operand, tuple) else operand
        if first is not None:
            return len(first.type.shape)
    return None


def from_front(dim: Attr, rank: int) -> Attr:
    """A dim, or each of several, counted from the front of a tensor of `rank` dims."""
    if isinstance(dim, tuple):
        return tuple(from_front(each, rank) for each in dim)
    return dim + rank if isinstance(dim, int) and dim < 0 and rank else dim
