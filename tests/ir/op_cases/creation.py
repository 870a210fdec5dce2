"""Cases of ops that make tensors from attributes alone."""

from __future__ import annotations

from moaic.ir.graph import Attr
from tests.ir.op_cases.drawing import Case, Cases, Drawn, case

cases = Cases()


@cases("full zeros ones empty.memory_format")
def constants(d: Drawn, name: str) -> Case:
    filled: dict[str, Attr] = {"fill_value": d.pick(0, 2.5)} if name == "aten.full" else {}
    dtype = d.pick("f64", "i64", "bool")
    attrs: dict[str, Attr] = {"size": d.shape(), "dtype": dtype, **filled}
    if name == "aten.empty.memory_format":
        made = case(name, **attrs)
        return Case(made.op, made.tensors, defined=False)
    return case(name, **attrs)


@cases("scalar_tensor")
def scalar_tensor(d: Drawn, name: str) -> Case:
    return case(name, s=d.number(-3, 3), dtype="f64")


@cases("arange arange.start arange.start_step")
def arange(d: Drawn, name: str) -> Case:
    start: dict[str, Attr] = {} if name == "aten.arange" else {"start": 2}
    step: dict[str, Attr] = {"step": 3} if name == "aten.arange.start_step" else {}
    return case(name, end=2 + d.size(), dtype="i64", **start, **step)


@cases("tril_indices triu_indices")
def triangle(d: Drawn, name: str) -> Case:
    return case(name, row=d.size(), col=d.size(), offset=d.number(-1, 1), dtype="i64")
