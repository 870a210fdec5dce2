"""All declarations, joined from the families, and their look-up by the name of an op."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Op
from moaic.ir.op_names import SEND
from moaic.ir.ops import (
    attention,
    convolution,
    copies,
    creation,
    elementwise,
    experts,
    indexing,
    instructions,
    linear_algebra,
    matmul,
    normalization,
    pooling,
    random,
    recurrent,
    reductions,
    value_checks,
    views,
)
from moaic.ir.ops.declaration import UNDECLARED, Kind, OpDecl
from moaic.ir.ops.rule_building import whole_rule
from moaic.ir.rules import Rule
from moaic.ir.sizes import in_example


def joined(*families: Iterable[OpDecl]) -> dict[str, OpDecl]:
    """Declarations by name; AssertionError where a name is declared twice."""
    table: dict[str, OpDecl] = {}
    for declaration in (one for family in families for one in family):
        assert declaration.name not in table, f"{declaration.name} is declared twice"
        table[declaration.name] = declaration
    return table


DECLARATIONS: Mapping[str, OpDecl] = joined(
    elementwise.OPS,
    creation.OPS,
    views.OPS,
    copies.OPS,
    reductions.OPS,
    linear_algebra.OPS,
    normalization.OPS,
    indexing.OPS,
    convolution.OPS,
    pooling.OPS,
    matmul.OPS,
    attention.OPS,
    experts.OPS,
    random.OPS,
    recurrent.OPS,
    value_checks.OPS,
    instructions.OPS,
)
"""Every declaration, those without a rule among them."""

OPS: Mapping[str, OpDecl] = {name: one for name, one in DECLARATIONS.items() if one.make_rule is not None}
"""Every op with a rule."""


def declaration_of(op: Op) -> OpDecl:
    """The declaration of an op; `UNDECLARED` where there is none."""
    return DECLARATIONS.get(op.name, UNDECLARED)


def rule_of(op: Op) -> Rule:
    """The rule of one op instance; an op without one holds every dim whole."""
    make_rule = declaration_of(op).make_rule
    return whole_rule(op) if make_rule is None else make_rule(op)


def kind_of(op: Op) -> Kind:
    return DECLARATIONS.get(op.name, UNDECLARED).kind  # asked millions of times: no further call


def flops_of(op: Op) -> int:
    """Floating-point operations of the unsplit op in the example; light ops count one per result element."""
    declaration = declaration_of(op)
    if declaration.flops is not None:
        return in_example(declaration.flops(op))
    if declaration.kind is not Kind.LIGHT:
        return 0
    return in_example(sum(result.type.elements() for result in op.results))


def takes_part(op: Op, at: Mapping[str, int]) -> bool:
    """Whether ranks at these coordinates take part in an op: it runs where its results are.

    A send also runs where its operand is.
    """
    sends = op.name == SEND and next(op.inputs()).type.layout.holds(at)
    return sends or all(value.type.layout.holds(at) for value in op.results)


_RANDOM = (
    "_cudnn_init_dropout_state", "_fused_dropout", "_sample_dirichlet", "_standard_gamma", "alpha_dropout", "bernoulli",
    "binomial", "cauchy", "dropout", "exponential", "feature_", "geometric", "log_normal", "multinomial",
    "native_dropout", "normal", "poisson", "rand", "rrelu", "uniform",
)  # fmt: skip
"""Prefixes of the names of random ops."""


def check_known(op: Op) -> None:
    """Raises Diagnostic for an op without a rule that is random or writes in place; any other is planned replicated."""
    if op.name in OPS:
        return
    base = op.name.split(".")[1] if "." in op.name else op.name
    in_place = base.startswith("__i") if base.startswith("__") else base.endswith("_")
    if base.startswith(_RANDOM) or in_place:
        raise Diagnostic(f"{op.name} has no sharding rule and is random or writes in place: it cannot be planned")
