"""Helpers that families share to localize attributes. `old` has the types before, `new` is the op with local ones."""

from __future__ import annotations

from dataclasses import replace

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Attr, Op
from moaic.ir.ops.declaration import Refit
from moaic.ir.ops.rule_building import attr_int


def with_attrs(op: Op, **attrs: Attr) -> Op:
    return replace(op, attrs={**op.attrs, **attrs})


def result_shape(op: Op) -> tuple[int, ...]:
    return op.results[0].type.shape


def dim_from_front(op: Op) -> int:
    """The dim that the attribute `dim` names, counted from the front; 0 for a scalar."""
    rank = len(next(op.inputs()).type.shape)
    return attr_int(op, "dim") % rank if rank else 0


def shape_in(name: str) -> Refit:
    """The attribute `name` states the shape of the result."""
    return lambda old, new: with_attrs(new, **{name: result_shape(new)})


def rows_in(name: str) -> Refit:
    """The attribute `name` states the first size of the result."""
    return lambda old, new: with_attrs(new, **{name: result_shape(new)[0]})


def cannot_split(op: Op, why: str) -> Diagnostic:
    place = f' at "{op.loc.file}":{op.loc.line}' if op.loc.file else ""
    return Diagnostic(f"`{op.name}`{place} cannot make or read a part of a tensor: {why}")


def never_split(why: str) -> Refit:
    """The result has to be whole; raises Diagnostic with the reason where it is not."""

    def refit(old: Op, new: Op) -> Op:
        if result_shape(old) != result_shape(new):
            raise cannot_split(old, why)
        return new

    return refit
