"""Ops: one declaration each, in the file of its family.

`OPS` has those with a rule by name. Passes, verifier and cost model ask the declaration and keep no tables of ops.
"""

from __future__ import annotations

from moaic.ir.op_names import CHECKED, SCALED_MM, SEND
from moaic.ir.ops.declaration import UNDECLARED, ByCoordinate, Kind, OpDecl
from moaic.ir.ops.matmul import SCALED_BLOCK
from moaic.ir.ops.reductions import reduced_dims
from moaic.ir.ops.registry import (
    DECLARATIONS,
    OPS,
    check_known,
    declaration_of,
    flops_of,
    joined,
    kind_of,
    rule_of,
    takes_part,
)
from moaic.ir.ops.rule_building import attr_int, attr_ints

__all__ = [
    "CHECKED",
    "DECLARATIONS",
    "OPS",
    "SCALED_BLOCK",
    "SCALED_MM",
    "SEND",
    "UNDECLARED",
    "ByCoordinate",
    "Kind",
    "OpDecl",
    "attr_int",
    "attr_ints",
    "check_known",
    "declaration_of",
    "flops_of",
    "joined",
    "kind_of",
    "reduced_dims",
    "rule_of",
    "takes_part",
]
