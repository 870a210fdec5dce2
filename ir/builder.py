"""Writing ops one after the other, each at the source location of the op that it replaces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moaic.ir.graph import Attr, Location, Op, Operand, Value
from moaic.ir.types import TensorType


@dataclass(slots=True, kw_only=True)
class OpBuilder:
    """The ops written so far."""

    loc: Location
    ops: list[Op] = field(default_factory=list[Op])

    def emit(self, name: str, operands: Sequence[Operand], kind: TensorType, **attrs: Attr) -> Value:
        """Appends an op with one result of type `kind`, and returns the result."""
        result = Value(kind)
        self.ops.append(Op(name, tuple(operands), (result,), attrs, self.loc))
        return result
