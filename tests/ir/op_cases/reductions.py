"""Cases of reductions, scans and sorts along dims."""

from __future__ import annotations

from hypothesis import strategies as st

from moaic.ir.graph import Attr
from tests.ir.op_cases.drawing import Case, Cases, Drawn, case

cases = Cases()


@cases("sum prod mean any all")
def reduce_all(d: Drawn, name: str) -> Case:
    return case(name, d.real(*d.shape()))


def keepdim(d: Drawn) -> dict[str, Attr]:
    return {"keepdim": True} if d.pick(False, True) else {}


@cases("sum.dim_IntList mean.dim amax amin any.dims logsumexp var.correction var_mean.correction")
def reduce_dims(d: Drawn, name: str) -> Case:
    """Over some dims, or over all of them where that may be left unsaid."""
    shape = d.shape(1)
    dims = d.draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, max_size=len(shape), unique=True))
    signed = tuple(at - len(shape) if d.pick(False, True) else at for at in dims)
    attrs: dict[str, Attr] = {"correction": 0} if "var" in name else {}
    if name == "aten.logsumexp" or d.pick(True, True, False):
        attrs |= {"dim": signed}
    elif name in ("aten.sum.dim_IntList", "aten.mean.dim"):
        attrs |= {"dim": d.pick(None, ())}
    return case(name, d.real(*shape), **attrs, **keepdim(d))


@cases("any.dim all.dim prod.dim_int max.dim min.dim argmax argmin")
def reduce_dim(d: Drawn, name: str) -> Case:
    shape = d.shape()
    if "arg" in name and d.pick(False, False, True):
        return case(name, d.fine(*shape))
    return case(name, d.real(*shape), dim=d.dim(len(shape)), **keepdim(d))


@cases("median.dim nanmedian.dim kthvalue mode")
def order_statistic(d: Drawn, name: str) -> Case:
    """Of numbers without ties, which may be at any of their places."""
    shape = d.shape(1)
    last = "median" not in name and d.pick(False, True)
    dim = -1 if last else d.dim(len(shape))
    attrs: dict[str, Attr] = {"k": d.number(1, shape[dim])} if name == "aten.kthvalue" else {}
    return case(name, d.fine(*shape), **attrs, **({} if last else {"dim": dim}), **keepdim(d))


@cases("cumprod logcumsumexp cummax cummin")
def cumulative(d: Drawn, name: str) -> Case:
    shape = d.shape(1)
    return case(name, d.unit(*shape), dim=d.dim(len(shape)))


@cases("cumsum")
def cumsum(d: Drawn, name: str) -> Case:
    shape = d.shape()
    return case(name, d.values(d.pick("r", "b"), shape), dim=d.dim(len(shape)))


@cases("topk")
def topk(d: Drawn, name: str) -> Case:
    shape = d.shape(1)
    dim = d.pick(None, d.dim(len(shape)))
    attrs: dict[str, Attr] = {} if dim is None else {"dim": dim}
    return case(name, d.fine(*shape), k=d.number(1, shape[-1 if dim is None else dim]), **attrs)


@cases("sort sort.stable")
def sort(d: Drawn, name: str) -> Case:
    shape = d.shape(1)
    attrs: dict[str, Attr] = {} if d.pick(False, True) else {"dim": d.dim(len(shape)), "descending": True}
    return case(name, d.fine(*shape), **({"stable": True} if name.endswith("stable") else {}), **attrs)


@cases("histc")
def histc(d: Drawn, name: str) -> Case:
    of_values: dict[str, Attr] = d.pick({}, {"min": 1, "max": 1})
    return case(name, d.real(*d.shape(1)), bins=d.number(1, 5), **d.pick({"min": -1, "max": 2}, of_values))
