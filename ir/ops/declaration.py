"""The declaration of an op: everything that the compiler knows of it stands in one `OpDecl`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from moaic.ir.coordinate_dependent import PartBuilder
from moaic.ir.graph import Op, Value
from moaic.ir.layout import Mesh
from moaic.ir.rules import Rule


class Kind(Enum):
    """What an op costs and how it may be moved."""

    NULLARY = "nullary"
    """Made from its attributes alone: built where it is needed."""
    VIEW = "view"
    """Metadata only."""
    LIGHT = "light"
    """Bound by memory; Inductor fuses it."""
    HEAVY = "heavy"
    """Bound by arithmetic, never recomputed lightly."""
    INSTRUCTION = "instruction"
    """Run by the worker itself, never inside compiled code."""


RuleMaker = Callable[[Op], Rule]

Complaints = Iterator[str]
"""What does not hold of an op, one message each; nothing where all holds."""

Check = Callable[[Op, Mesh], Complaints]

Refit = Callable[[Op, Op], Op]
"""From an op and the same op on local types to the latter with attributes that fit its shapes."""

CostFamily = Literal["cheap", "costly", "mm", "sdpa", "sdpa_backward", "convolution", "convolution_backward"]
"""The measured rate at which an op computes; a `costly` light op takes many instructions per element."""


@dataclass(frozen=True, slots=True)
class ByCoordinate:
    """How an op depends on the rank's coordinates, once certain dims are split."""

    dims: Callable[[Op], Iterator[tuple[Value, int]]]
    """The dims whose split makes the op depend on coordinates, each as a value and one of its dims."""
    rewrite: Callable[[PartBuilder, Op], None]
    """Emits the ops that a rank runs instead of the op given."""
    always: bool = False
    """Whether the op is rewritten although no axis splits it: a draw then still records its global shape."""


@dataclass(frozen=True, slots=True)
class OpDecl:
    """One op. Only name and rule are required: the other fields are what most ops are."""

    name: str
    make_rule: RuleMaker | None
    """Factors and linear operands of an instance; None: an op that text may hold, but that is planned replicated."""
    kind: Kind = Kind.LIGHT
    flops: Callable[[Op], int] | None = None
    """Floating-point operations of the unsplit op; None: one per result element of a light op, none of any other."""
    cost: CostFamily = "cheap"
    check: Check | None = None
    """Verification beyond the rule: operand count, shapes, attributes."""
    refit: Refit | None = None
    """Localization of attributes that state sizes; None: the attributes hold for any part."""
    by_coordinate: ByCoordinate | None = None
    """Localization of an op whose part depends on the rank's coordinates; None: it does not."""
    exact: bool = False
    """Whether the result's bits are the same in whatever shape it is run: it moves, selects, compares or counts."""
    lowered: bool = False
    """Whether runtime/codegen/lower_to_fx.py defines its lowering; otherwise it is one aten call of its name."""
    looks_up: bool = False
    """Whether it reads only as much of its first operand as its result holds."""
    in_place: bool = False
    """Whether its result may take the memory of an operand that is dead afterwards."""
    rank_local: bool = False
    """Whether it cuts what one rank holds, so that its operands say nothing of global tensors."""
    host_reads: bool = False
    """Whether the host has to see a value that the device has computed."""
    memory_passes: int = 0
    """Times that an instruction which sends nothing reads or writes its result; 0 for any other op."""


UNDECLARED = OpDecl("", None)
"""What is assumed of an op without a declaration."""


def each(names: str, pattern: OpDecl) -> tuple[OpDecl, ...]:
    """Declarations alike but for their names: each of `names`, blanks between, replaces the `*` of `pattern`."""
    return tuple(replace(pattern, name=pattern.name.replace("*", name)) for name in names.split())
