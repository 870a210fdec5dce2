"""IR as calls of torch: one op on tensors, and a whole function as an FX graph.

This is the only file that turns IR into FX. The meaning of an op stands once, as plain torch calls (`LOWERINGS`, with
families in `lower_*.py` beside this file): run on tensors they interpret the op, traced they give the graph to compile.
Values of the IR have no strides, so every op takes operands of any strides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from moaic.ir.graph import Function, Op, Operand, Value
from moaic.ir.op_names import (
    ADD_TO,
    CHECKED,
    FOLD_KEY,
    GROUPED_MM,
    GROUPED_OUTER,
    RAND,
    RECURRENT,
    RECURRENT_BACKWARD,
    REPEAT_LAST,
    SCALED_MM,
    SDPA,
    SDPA_BACKWARD,
)
from moaic.ir.ops.refitting import dim_from_front
from moaic.ir.specialize import Specializer
from moaic.ir.symbols import Numbers
from moaic.ir.types import TensorType
from moaic.runtime.codegen import checked, lower_experts, recurrent_layers
from moaic.runtime.codegen.cpu_gemm import product
from moaic.runtime.codegen.integer_division import check_divisors
from moaic.runtime.codegen.lower_attention import sdpa, sdpa_backward
from moaic.runtime.codegen.lower_float8 import scaled_mm
from moaic.runtime.codegen.lower_random import fold_key, rand, teach_inductor
from moaic.runtime.codegen.memory_order import ordered
from moaic.runtime.codegen.narrow_on_cpu import PRODUCTS, wide_operands
from moaic.runtime.dtypes import DTYPES
from moaic.runtime.protocol import aten_schema

ComputeFunction = Callable[[list[Tensor]], list[Tensor]]
"""A compute function: from its parameters in order to its results in order."""

Lowering = Callable[[Op, Sequence[Any], torch.device], Tensor | Sequence[Tensor]]

CPU: Final = torch.device("cpu")

_PRODUCTS: Final = frozenset({*(f"aten.{packet}" for packet in PRODUCTS), GROUPED_MM, GROUPED_OUTER})
"""The kernels of attention keep their sums in float32 by themselves."""

_INTEGERS: Final = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def run_op(op: Op, operands: Sequence[Any], device: torch.device = CPU) -> tuple[Tensor, ...]:
    """The results of a compute op on tensors (None for an absent operand, lists for tensor lists)."""
    wide = wide_operands(operands) if device.type == "cpu" and op.name in _PRODUCTS else None
    if wide is not None:
        results = _run_op(op, wide, device)
        return tuple(value.to(DTYPES[made.type.dtype]) for value, made in zip(results, op.results, strict=True))
    return _run_op(op, operands, device)


def _run_op(op: Op, operands: Sequence[Any], device: torch.device) -> tuple[Tensor, ...]:
    lowering = LOWERINGS.get(op.name)
    results = _run_aten(op, operands, device) if lowering is None else lowering(op, operands, device)
    if isinstance(results, Tensor):
        return (results,)
    # A convolution's backward gives None for gradients that were not requested: they are no results in the IR.
    return tuple(result for result in results if result is not None)


def run_ops(function: Function, inputs: Sequence[Tensor], device: torch.device = CPU) -> list[Tensor]:
    """Runs `function` op by op; each value is released after its last use."""
    values: dict[Value, Tensor] = dict(zip(function.params, inputs, strict=True))
    dying = last_uses(function)
    for op, dead in zip(function.ops, dying, strict=True):
        results = run_op(op, [operand_of(operand, values) for operand in op.operands], device)
        values.update(zip(op.results, results, strict=True))
        for value in dead:
            del values[value]
    return [values[result] for result in function.results]


def operand_of(operand: Operand, values: Mapping[Value, Tensor]) -> Any:
    if isinstance(operand, tuple):
        return [None if value is None else values[value] for value in operand]
    return None if operand is None else values[operand]


def last_uses(function: Function) -> list[list[Value]]:
    """For each op, the values that no later op reads."""
    alive = set(function.results)
    dying: list[list[Value]] = []
    for op in reversed(function.ops):
        dead = list(dict.fromkeys(value for value in (*op.inputs(), *op.results) if value not in alive))
        alive.update(dead)
        dying.append(dead)
    return dying[::-1]


@dataclass(frozen=True, slots=True)
class Numbering:
    """How a traced function with open sizes takes them: the first inputs are whole numbers, one per symbol."""

    example: Mapping[str, int]
    """The number of each symbol, in the order of the inputs."""
    scales: Mapping[str, int]
    """What a symbol's number is a multiple of, if not of 1: the input is the quotient, so that no size is one."""

    def inputs(self, numbers: Numbers) -> list[int]:
        """The inputs for these numbers of the symbols."""
        return [numbers[name] // self.scales.get(name, 1) for name in self.example]

    def numbers(self, inputs: Sequence[int]) -> Numbers:
        """The numbers of the symbols; symbolic if the inputs are."""
        pairs = zip(self.example, inputs, strict=True)
        return {name: number * self.scales.get(name, 1) for name, number in pairs}


def trace(
    function: Function,
    device: torch.device = CPU,
    decompositions: Mapping[Any, Any] | None = None,
    numbering: Numbering | None = None,
) -> tuple[GraphModule, FakeTensorMode]:
    """`function` as an FX graph from contiguous inputs to contiguous outputs, and the mode of its fake tensors.

    A function with open sizes needs a `numbering`.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    teach_inductor()
    check_divisors()
    numbering = numbering or Numbering({}, {})

    def body(*given: Any) -> list[Tensor]:
        numbers, inputs = given[: len(numbering.example)], given[len(numbering.example) :]
        at = Specializer(numbering.numbers(numbers)).function(function) if numbers else function
        # As an op: the method would make the device the current one, and it may not be here.
        return [torch.ops.aten.contiguous(result) for result in run_ops(at, inputs, device)]

    # Inductor's cache refuses graphs whose fake mode has no shape environment.
    shape_env = ShapeEnv()
    # Python's kernels of ops take symbolic numbers where those in C++ do not.
    dispatcher = enable_python_dispatcher() if numbering.example else nullcontext()
    with FakeTensorMode(shape_env=shape_env, static_shapes=not numbering.example) as mode, torch.no_grad(), dispatcher:
        numbers = [
            _symbolic(shape_env, name, n)
            for name, n in zip(numbering.example, numbering.inputs(numbering.example), strict=True)
        ]
        at = Specializer(numbering.numbers(numbers))
        examples = [*numbers, *(example(at.type(param.type), device) for param in function.params)]
        graph_module = make_fx(body, decomposition_table=dict(decompositions or {}), tracing_mode="real")(*examples)
    for node, number in zip(graph_module.graph.find_nodes(op="placeholder"), numbers, strict=False):
        node.meta["val"] = number
    return graph_module, mode


def _symbolic(shape_env: Any, name: str, number: int) -> Any:
    """A new symbol of PyTorch's, `number` in the example."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = ConstantSource(name)
    symbol = shape_env.create_symbol(number, source, DimDynamic.DYNAMIC, None)
    return shape_env.create_symintnode(symbol, hint=number, source=source)


def example(kind: TensorType, device: torch.device = CPU) -> Tensor:
    """An uninitialised contiguous tensor of one type."""
    return torch.empty(kind.shape, dtype=DTYPES[kind.dtype], device=device)


def _run_aten(op: Op, operands: Sequence[Any], device: torch.device) -> Any:
    called = aten_schema.signature(op.name)
    args, kwargs = aten_schema.call_arguments(called, operands, op.attrs, device)
    return ordered(called.overload)(*args, **kwargs)


def _view(op: Op, operands: Sequence[Any], device: torch.device) -> Tensor:
    return operands[0].reshape(op.attrs["size"])


def _view_as_complex(op: Op, operands: Sequence[Any], device: torch.device) -> Tensor:
    """Made contiguous: the two parts of a complex number must be adjacent in memory."""
    return torch.ops.aten.view_as_complex.default(operands[0].contiguous())


def _div(op: Op, operands: Sequence[Any], device: torch.device) -> Tensor:
    """Truncating division of integers raises for a zero divisor: Inductor's kernel would end the process."""
    (dividend, divisor), _ = aten_schema.call_arguments(aten_schema.signature(op.name), operands, op.attrs, device)
    if op.attrs.get("rounding_mode") != "trunc" or torch.result_type(dividend, divisor) not in _INTEGERS:
        return _run_aten(op, operands, device)
    return torch.floor_divide(dividend - torch.fmod(dividend, divisor), divisor)


def _mm(op: Op, operands: Sequence[Any], device: torch.device) -> Tensor:
    return product(*operands)


def _checked(op: Op, operands: Sequence[Any], device: torch.device) -> Tensor:
    value, said = operands
    return checked.checked(value, said, str(op.attrs["message"]))


def _add_to(op: Op, operands: Sequence[Any], device: torch.device) -> Tensor:
    """Out of place here; `add_in_place` has compiled functions write the sum over its first operand."""
    return torch.add(*operands)


def _repeat_last(op: Op, operands: Sequence[Any], device: torch.device) -> Tensor:
    (source,), dim = operands, dim_from_front(op)
    index = torch.arange(op.results[0].type.shape[dim], device=device).clamp(max=source.shape[dim] - 1)
    return torch.index_select(source, dim, index)


LOWERINGS: Final[Mapping[str, Lowering]] = {
    "aten.view": _view,
    "aten.view_as_complex": _view_as_complex,
    "aten.div.Scalar_mode": _div,
    "aten.div.Tensor_mode": _div,
    "aten.mm": _mm,
    SDPA: sdpa,
    SDPA_BACKWARD: sdpa_backward,
    GROUPED_MM: lower_experts.grouped_mm,
    GROUPED_OUTER: lower_experts.grouped_outer,
    SCALED_MM: scaled_mm,
    RECURRENT: recurrent_layers.recurrent,
    RECURRENT_BACKWARD: recurrent_layers.recurrent_backward,
    FOLD_KEY: fold_key,
    RAND: rand,
    CHECKED: _checked,
    ADD_TO: _add_to,
    REPEAT_LAST: _repeat_last,
}
"""The ops that are not always one aten call: those of `moai`, and those whose aten form depends on strides."""


# Accumulation in place, by rewriting the FX graph.


def scatters() -> dict[Any, Any]:
    """Decompositions into plain scatters, which Inductor would apply later on: `add_in_place` looks for scatters."""
    from torch import _decomp

    masked = torch.ops.aten._unsafe_masked_index_put_accumulate.default
    return {masked: cast("dict[Any, Any]", _decomp.decomposition_table)[masked]}


def add_in_place(graph_module: GraphModule, positions: Iterable[int]) -> None:
    """Has the graph write sums over the parameters at these positions, where it adds to one and returns the sum.

    The matmul or scatter that makes the summand adds it to the parameter itself; if another op makes it, the sum is
    copied over the parameter. A sum that an earlier rewrite has changed is left alone: its result is new memory. To be
    called in the graph's fake mode.

        %part = mm(%a, %b)
        %sum = add(%total, %part)       ->      addmm_(%total, %a, %b)
        return %sum                             return %total
    """
    graph = graph_module.graph
    parameters = [node for node in graph.nodes if node.op == "placeholder"]
    output = graph.output_node()
    for total in (parameters[position] for position in positions):
        readers = list(total.users)
        if len(readers) == 1 and _is_last_addition(readers[0], total, output):
            _write_over(graph, total, readers[0], output)
    graph_module.recompile()


def _is_last_addition(node: Node, total: Node, output: Node) -> bool:
    is_addition = node.target is torch.ops.aten.add.Tensor and node.args[0] is total and not node.kwargs
    return is_addition and list(node.users) == [output]


def _write_over(graph: Graph, total: Node, addition: Node, output: Node) -> None:
    part: Any = addition.args[1]
    only_added = isinstance(part, Node) and len(part.users) == 1 and _dtype(part) == _dtype(total)
    add = ADDING.get(part.target) if only_added else None
    with graph.inserting_before(addition):
        added = add is not None and add(graph, total, *part.args)
    if added:
        output.replace_input_with(addition, total)
        graph.erase_node(addition)
        graph.erase_node(part)
        return
    with graph.inserting_before(output):
        output.replace_input_with(addition, _call(graph, torch.ops.aten.copy_.default, total, addition))


def _dtype(node: Node) -> torch.dtype:
    return node.meta["val"].dtype


def _call(graph: Graph, target: Any, *args: Any) -> Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*map_arg(args, lambda node: node.meta["val"]))
    return node


def _add_matmul(graph: Graph, total: Node, left: Node, right: Node) -> bool:
    _have_inductor_call(torch.ops.aten.addmm_.default)
    _call(graph, torch.ops.aten.addmm_.default, total, left, right)
    return True


def _have_inductor_call(target: Any) -> None:
    """Makes `target` a fallback of Inductor: a call of PyTorch's own kernel.

    Inductor does so by itself for an op without a lowering, but raises if CI is set in the environment: it then takes
    the missing lowering for an oversight of PyTorch's own developers.
    """
    from torch._inductor import lowering

    inductor: Any = lowering
    if target not in inductor.lowerings:
        inductor.make_fallback(target, warn=False)


def _add_scatter(
    graph: Graph, total: Node, base: Node, indices: list[Node | None], values: Node, accumulate: bool = False
) -> bool:
    if not accumulate or not _is_zero(base):
        return False
    _call(graph, torch.ops.aten.index_put_.default, total, indices, values, True)
    return True


def _is_zero(node: Node) -> bool:
    return node.target is torch.ops.aten.full.default and node.args[1] in (0, 0.0)


ADDING: Final[Mapping[Any, Callable[..., bool]]] = {
    torch.ops.aten.mm.default: _add_matmul,
    torch.ops.aten.index_put.default: _add_scatter,
    torch.ops.aten._unsafe_index_put.default: _add_scatter,
}
"""By the op that makes the summand: rewrites the op so that it adds to the total; False for an instance that cannot."""
