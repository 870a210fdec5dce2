"""The declaration of an op: everything that the compiler knows about it is in one `OpDecl`."""

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
    """The cost class of an op, which also decides where it may be moved."""

    NULLARY = "nullary"
    """Computed from its attributes alone: computed again where it is needed."""
    VIEW = "view"
    """Metadata only."""
    LIGHT = "light"
    """Bound by memory; Inductor fuses it."""
    HEAVY = "heavy"
    """Bound by arithmetic, not recomputed unless the plan says so."""
    INSTRUCTION = "instruction"
    """Run by the worker itself, never inside compiled code."""


RuleMaker = Callable[[Op], Rule]

Complaints = Iterator[str]
"""One message per violated requirement; none if an op is valid."""

Check = Callable[[Op, Mesh], Complaints]

Refit = Callable[[Op, Op], Op]
"""Takes an op and the same op on local types; returns the latter with attributes that fit its shapes."""

CostFamily = Literal["cheap", "costly", "mm", "sdpa", "sdpa_backward", "convolution", "convolution_backward"]
"""The measured rate at which an op computes; a `costly` light op takes many instructions per element."""


@dataclass(frozen=True, slots=True)
class ByCoordinate:
    """The dependence of an op on the rank's coordinates if certain dims are split."""

    dims: Callable[[Op], Iterator[tuple[Value, int]]]
    """The dims whose split makes the op depend on coordinates, each as a value and one of its dims."""
    rewrite: Callable[[PartBuilder, Op], None]
    """Emits the ops that a rank runs instead of the op."""
    always: bool = False
    """Whether the op is rewritten although no axis splits it: a draw then still records its global shape."""


@dataclass(frozen=True, slots=True)
class OpDecl:
    """One op. Only name and rule are required: the defaults of the other fields fit most ops."""

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
    """Localization if the op's part depends on the rank's coordinates; None if it does not."""
    exact: bool = False
    """Whether the result's bits are the same in whatever shape it is run: it moves, selects, compares or counts."""
    lowered: bool = False
    """Whether runtime/codegen/lower_to_fx.py defines its lowering; otherwise it is one aten call of its name."""
    looks_up: bool = False
    """Whether it reads only as much of its first operand as its result holds."""
    in_place: bool = False
    """Whether its result may take the memory of an operand that is dead afterwards."""
    rank_local: bool = False
    """Whether it acts on the part of one rank, so that its operands are not global tensors."""
    host_reads: bool = False
    """Whether the host must read a value that the device has computed."""
    workspace: Callable[[Op], int] | None = None
    """Bytes that the op needs while it runs, beside operands and results; None if that is little."""
    memory_passes: int = 0
    """Times that an instruction which sends nothing reads or writes its result; 0 for any other op."""


UNDECLARED = OpDecl("", None)
"""The declaration assumed for an op that has none."""


def each(names: str, pattern: OpDecl) -> tuple[OpDecl, ...]:
    """One declaration per name in `names` (separated by blanks), which replaces the `*` of `pattern`."""
    return tuple(replace(pattern, name=pattern.name.replace("*", name)) for name in names.split())
