"""Small steps written by hand, and a machine with round numbers."""

from __future__ import annotations

from moaic.ir.graph import Module
from moaic.ir.verify import load
from moaic.passes.perf.links import Link
from moaic.passes.perf.machine import Machine
from moaic.passes.perf.numbers import MeasureSource, Number


def dense(rows: int = 8, width: int = 4, hidden: int = 16) -> Module:
    """Two linear layers with a relu between them; the loss is the sum of the outputs."""
    r, w, h = rows, width, hidden
    return load(f"""// moai 1
func @step(%x: f32[{r}, {w}] input "x", %a: f32[{w}, {h}] param "a", %b: f32[{h}, {w}] param "b")
    -> (f32[] output "loss", f32[{w}, {h}] grad "a", f32[{h}, {w}] grad "b") {{
  %u = aten.mm %x, %a : f32[{r}, {h}] forward
  %v = aten.relu %u : f32[{r}, {h}] forward
  %y = aten.mm %v, %b : f32[{r}, {w}] forward
  %loss = aten.sum %y : f32[] forward
  %one = aten.full {{size = [{r}, {w}], fill_value = 1.0, dtype = "f32"}} : f32[{r}, {w}] backward
  %vt = aten.permute %v {{dims = [1, 0]}} : f32[{h}, {r}] backward
  %gb = aten.mm %vt, %one : f32[{h}, {w}] backward
  %bt = aten.permute %b {{dims = [1, 0]}} : f32[{w}, {h}] backward
  %gv = aten.mm %one, %bt : f32[{r}, {h}] backward
  %positive = aten.gt.Scalar %u {{other = 0}} : bool[{r}, {h}] backward
  %zero = aten.full {{size = [], fill_value = 0.0, dtype = "f32"}} : f32[] backward
  %gu = aten.where.self %positive, %gv, %zero : f32[{r}, {h}] backward
  %xt = aten.permute %x {{dims = [1, 0]}} : f32[{w}, {r}] backward
  %ga = aten.mm %xt, %gu : f32[{w}, {h}] backward
  return %loss, %ga, %gb
}}
""")


def evaluation(rows: int = 8) -> Module:
    """One linear layer, forward only."""
    return load(f"""// moai 1
func @step(%x: f32[{rows}, 4] input "x", %a: f32[4, 16] param "a") -> (f32[{rows}, 16] output "y") {{
  %y = aten.mm %x, %a : f32[{rows}, 16] forward
  return %y
}}
""")


def normalized(rows: int = 8) -> Module:
    """A matmul of inputs that are normalized over the batch: nothing after the first op can run in micro-batches."""
    return load(f"""// moai 1
func @step(%x: f32[{rows}, 4] input "x", %a: f32[4, 4] param "a") -> (f32[] output "loss", f32[4, 4] grad "a") {{
  %u = aten.mm %x, %a : f32[{rows}, 4] at "model.py":7 in "body" forward
  %high = aten.amax %u {{dim = [0], keepdim = true}} : f32[1, 4] at "model.py":8 in "body.norm" forward
  %y = aten.sub.Tensor %u, %high : f32[{rows}, 4] at "model.py":8 in "body.norm" forward
  %z = aten.mul.Tensor %y, %y : f32[{rows}, 4] at "model.py":9 in "body" forward
  %loss = aten.sum %z : f32[] at "model.py":9 in "body" forward
  %xt = aten.permute %x {{dims = [1, 0]}} : f32[4, {rows}] backward
  %ga = aten.mm %xt, %z : f32[4, 4] at "model.py":7 in "body" backward
  return %loss, %ga
}}
""")


def machine(workers: int = 2, memory: int = 1 << 30, overhead: float = 0.0) -> Machine:
    """A billion of everything per second, measured; collectives take a millisecond to begin."""
    giga = Number(1e9, MeasureSource.MEASURED)
    link = Link(Number(1e-3, MeasureSource.MEASURED), giga, 2)
    links = {"all_reduce": link, "reduce_scatter": link, "all_gather": link}
    rates = {"mm.f32": giga, "cheap.f32": giga, "costly.f32": giga}
    return Machine(workers, memory, giga, rates, links, Number(overhead, MeasureSource.MEASURED))
