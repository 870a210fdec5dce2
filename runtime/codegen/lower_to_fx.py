"""The IR as calls of torch: each op on real tensors, and a whole function as an FX graph.

This is the only file that turns IR into FX. What an op means is said once, as plain torch calls; run on tensors they
interpret the op, traced they give the graph that is compiled. Values have no strides in the IR, so every op takes
operands of any strides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from moaic.ir.attention import is_causal
from moaic.ir.graph import Function, Op, Operand, Value
from moaic.ir.op_names import ADD_TO, CHECKED, FOLD_KEY, GROUPED_MM, GROUPED_OUTER, RAND, SCALED_MM, SDPA, SDPA_BACKWARD
from moaic.ir.ops import SCALED_BLOCK
from moaic.ir.types import TensorType
from moaic.runtime.codegen import checked, grouped_mm
from moaic.runtime.codegen.cpu_gemm import product
from moaic.runtime.codegen.gpu_attention import Attention, library_for
from moaic.runtime.codegen.memory_order import ordered
from moaic.runtime.dtypes import DTYPES
from moaic.runtime.protocol import aten_schema
from moaic.runtime.rng import WORD, global_index, mix

ComputeFunction = Callable[[list[Tensor]], list[Tensor]]
"""A compute function: takes its parameters in order, gives its results in order."""

Lowering = Callable[[Op, Sequence[Any], torch.device], Tensor | tuple[Tensor, ...]]

CPU: Final = torch.device("cpu")

_INTEGERS: Final = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def run_op(op: Op, operands: Sequence[Any], device: torch.device = CPU) -> tuple[Tensor, ...]:
    """The results of a compute op on tensors (None for an absent operand, lists for tensor lists)."""
    lowering = LOWERINGS.get(op.name)
    results = _run_aten(op, operands, device) if lowering is None else lowering(op, operands, device)
    if isinstance(results, Tensor):
        return (results,)
    # A convolution's backward gives None for gradients that nobody asked for: they are no results in the IR.
    return tuple(result for result in results if result is not None)


def run_ops(function: Function, inputs: Sequence[Tensor], device: torch.device = CPU) -> list[Tensor]:
    """Run `function` op by op; values are let go after their last use."""
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
    """Per op, the values that nothing after it reads."""
    alive = set(function.results)
    dying: list[list[Value]] = []
    for op in reversed(function.ops):
        dead = list(dict.fromkeys(value for value in (*op.inputs(), *op.results) if value not in alive))
        alive.update(dead)
        dying.append(dead)
    return dying[::-1]


def trace(
    function: Function, device: torch.device = CPU, decompositions: Mapping[Any, Any] | None = None
) -> tuple[GraphModule, FakeTensorMode]:
    """`function` as an FX graph, contiguous inputs to contiguous outputs, and the mode of its fake tensors."""
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    def body(*inputs: Tensor) -> list[Tensor]:
        # As an op: the method would make the device the current one, and it may not be here.
        return [torch.ops.aten.contiguous(result) for result in run_ops(function, inputs, device)]

    # Inductor's cache refuses graphs whose fake mode has no shape environment.
    with FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True) as mode, torch.no_grad():
        examples = [example(param.type, device) for param in function.params]
        graph_module = make_fx(body, decomposition_table=dict(decompositions or {}), tracing_mode="real")(*examples)
    return graph_module, mode


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
    """Both parts of a number must lie side by side."""
    return torch.ops.aten.view_as_complex.default(operands[0].contiguous())


def _divided(op: Op, operands: Sequence[Any], device: torch.device) -> Tensor:
    """Quotients of integers without their remainder, whose kernel raises for a zero: Inductor's ends the process."""
    (dividend, divisor), _ = aten_schema.call_arguments(aten_schema.signature(op.name), operands, op.attrs, device)
    if op.attrs.get("rounding_mode") != "trunc" or torch.result_type(dividend, divisor) not in _INTEGERS:
        return _run_aten(op, operands, device)
    return torch.floor_divide(dividend - torch.fmod(dividend, divisor), divisor)


def _mm(op: Op, operands: Sequence[Any], device: torch.device) -> Tensor:
    return product(*operands)


def _ints(attr: Any) -> tuple[int, ...]:
    return tuple(attr)


# Attention. Masks may be booleans (True: look) or numbers that are added.


def _sdpa(op: Op, operands: Sequence[Any], device: torch.device) -> tuple[Tensor, Tensor]:
    query, key, value, *rest = operands
    mask = _additive(rest[0] if rest else None, query)
    causal, scale = _attention_attrs(op, query)
    if _flash_takes(query, value, mask, device):
        out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *map(_in_rows, (query, key, value)), 0.0, causal, attn_mask=mask, scale=scale
        )
        return out, logsumexp
    asked = Attention(query, key, value, mask, causal, scale)
    if library := library_for(asked, device):
        return library.forward(asked)
    scores = _scores(query, key, mask, causal, scale)
    logsumexp = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - _finite(logsumexp).unsqueeze(-1))
    return (weights @ value.to(weights.dtype)).to(query.dtype), logsumexp


def _sdpa_backward(op: Op, operands: Sequence[Any], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    grad, query, key, value, out, logsumexp, *rest = operands
    mask = _additive(rest[0] if rest else None, query)
    causal, scale = _attention_attrs(op, query)
    if _flash_takes(query, value, mask, device):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, *map(_in_rows, (query, key, value, out)), logsumexp, 0.0, causal, attn_mask=mask, scale=scale
        )
    asked = Attention(query, key, value, mask, causal, scale)
    if library := library_for(asked, device):
        return library.backward(asked, grad, out, logsumexp)
    weights = torch.exp(_scores(query, key, mask, causal, scale) - _finite(logsumexp).unsqueeze(-1))
    wide = weights.dtype
    grad_weights = grad.to(wide) @ value.to(wide).transpose(-1, -2)
    delta = (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True)
    grad_scores = weights * (grad_weights - delta) * scale
    grad_query = grad_scores @ key.to(wide)
    grad_key = grad_scores.transpose(-1, -2) @ query.to(wide)
    grad_value = weights.transpose(-1, -2) @ grad.to(wide)
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


def _additive(mask: Tensor | None, query: Tensor) -> Tensor | None:
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, zero, float("-inf"))
    while mask.dim() < query.dim():
        mask = mask.unsqueeze(0)
    return mask


def _attention_attrs(op: Op, query: Tensor) -> tuple[bool, float]:
    scale: Any = op.attrs.get("scale")
    return is_causal(op), query.shape[-1] ** -0.5 if scale is None else float(scale)


def _flash_takes(query: Tensor, value: Tensor, mask: Tensor | None, device: torch.device) -> bool:
    """Whether PyTorch's flash attention for CPUs is legal here."""
    return (
        device.type == "cpu"
        and query.dim() == 4
        and query.shape[-1] == value.shape[-1]
        and prod(query.shape) > 0
        and (mask is None or mask.dtype in (query.dtype, torch.float32))
    )


def _in_rows(x: Tensor) -> Tensor:
    """`x` whose elements lie side by side along the last dim, as the kernel reads them without asking how they lie."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = (query.to(wide) @ key.to(wide).transpose(-1, -2)) * scale
    if mask is not None:
        scores = scores + mask
    if causal:
        rows = torch.arange(query.shape[-2], device=query.device).unsqueeze(-1)
        columns = torch.arange(key.shape[-2], device=query.device)
        scores = torch.where(columns <= rows, scores, float("-inf"))
    return scores


def _finite(logsumexp: Tensor) -> Tensor:
    """A row that may look at nothing gets zero weights rather than NaN."""
    return torch.where(logsumexp == float("-inf"), 0.0, logsumexp)


# Random numbers, by runtime/rng.py.


def _fold_key(op: Op, operands: Sequence[Any], device: torch.device) -> Tensor:
    instance: Any = op.attrs["instance"]
    key = operands[0]
    words = mix(mix(key & WORD) ^ ((key >> 32) & WORD))
    return mix(words ^ mix((words.flip(0) + mix(instance + 1)) & WORD))


def _rand(op: Op, operands: Sequence[Any], device: torch.device) -> Tensor:
    key, *coordinates = operands
    shape = op.results[0].type.shape
    global_shape = _ints(op.attrs.get("global_shape", shape))
    splits: Any = op.attrs.get("splits", ())
    index = global_index(shape, global_shape, splits, coordinates, device)
    word = mix(((index & WORD) + key[0]) & WORD)
    if prod(global_shape) > WORD:
        word = (word + (index >> 32)) & WORD
    word = mix(word ^ (key[1] & WORD))
    return ((word >> 8).to(torch.float32) * 2.0**-24).to(DTYPES[op.results[0].type.dtype])


def _checked(op: Op, operands: Sequence[Any], device: torch.device) -> Tensor:
    value, said = operands
    return checked.checked(value, said, str(op.attrs["message"]))


def _add_to(op: Op, operands: Sequence[Any], device: torch.device) -> Tensor:
    """What is compiled writes this where the sum lay (`add_in_place`)."""
    return torch.add(*operands)


# Experts. With a leading dim the matrices fall into as many blocks, and a row is zero in all blocks but its own.


def _grouped_mm(op: Op, operands: Sequence[Any], device: torch.device) -> Tensor:
    x, weight, ids = operands
    shape = op.results[0].type.shape
    if len(shape) == 2:
        return grouped_mm.grouped_mm(x, weight, ids)
    blocks, each = shape[0], weight.shape[0] // shape[0]
    made = [
        grouped_mm.grouped_mm(x[min(i, len(x) - 1)], weight[i * each : (i + 1) * each], ids - i * each)
        for i in range(blocks)
    ]
    return torch.stack(made)


def _grouped_outer(op: Op, operands: Sequence[Any], device: torch.device) -> Tensor:
    grad, x, ids = operands
    count: Any = op.attrs["count"]
    if grad.dim() == 2:
        return grouped_mm.grouped_outer(grad, x, ids, count)
    blocks = max(len(grad), len(x))
    each = count // blocks
    made = [
        grouped_mm.grouped_outer(grad[min(i, len(grad) - 1)], x[min(i, len(x) - 1)], ids - i * each, each)
        for i in range(blocks)
    ]
    return torch.cat(made)


# Eight-bit floats.


def _scaled_mm(op: Op, operands: Sequence[Any], device: torch.device) -> Tensor:
    """On GPUs the left matrix row by row, the right one column by column, in whole blocks: they multiply no others.

    CPUs multiply float32 faster: PyTorch's own product of such matrices takes three times as long there.
    """
    left, right, left_scale, right_scale = operands
    named: Any = op.attrs["dtype"]
    dtype = DTYPES[named]
    if device.type == "cpu":
        wide = dtype if dtype == torch.float64 else torch.float32
        return (product(left.to(wide), right.to(wide)) * left_scale * right_scale).to(dtype)
    rows, columns = _in_blocks(left), _in_blocks(right.t()).t()
    # Kernels take two numbers, or one for each row and one for each column.
    if left_scale.shape != (1, 1) or right_scale.shape != (1, 1):
        left_scale = left_scale.expand(left.shape[0], 1)
        right_scale = right_scale.expand(1, right.shape[1])
    fast: Any = op.attrs.get("use_fast_accum", False)
    return torch.ops.aten._scaled_mm.default(
        rows, columns, _by_rows(left_scale), _by_rows(right_scale), out_dtype=dtype, use_fast_accum=fast
    )


def _in_blocks(matrix: Tensor) -> Tensor:
    """Row by row, with as many zeros at the end of each row as complete its last block."""
    missing = -matrix.shape[1] % SCALED_BLOCK
    if not missing:
        return _by_rows(matrix)
    padded = torch.constant_pad_nd(_by_rows(matrix).view(torch.uint8), (0, missing))
    return padded.view(matrix.dtype)


def _by_rows(matrix: Tensor) -> Tensor:
    return torch.ops.aten.clone.default(matrix, memory_format=torch.contiguous_format)


LOWERINGS: Final[Mapping[str, Lowering]] = {
    "aten.view": _view,
    "aten.view_as_complex": _view_as_complex,
    "aten.div.Scalar_mode": _divided,
    "aten.div.Tensor_mode": _divided,
    "aten.mm": _mm,
    SDPA: _sdpa,
    SDPA_BACKWARD: _sdpa_backward,
    GROUPED_MM: _grouped_mm,
    GROUPED_OUTER: _grouped_outer,
    SCALED_MM: _scaled_mm,
    FOLD_KEY: _fold_key,
    RAND: _rand,
    CHECKED: _checked,
    ADD_TO: _add_to,
}
"""Ops that are not always one aten call: our own, and those whose aten form depends on strides."""


# Sums that a compiled function adds to where they lie. One function per op that can be told to add what it makes to
# something; false where an instance of it cannot.


def scatters() -> dict[Any, Any]:
    """Decompositions that leave plain scatters where Inductor would make the same of them later on."""
    from torch import _decomp

    masked = torch.ops.aten._unsafe_masked_index_put_accumulate.default
    return {masked: cast("dict[Any, Any]", _decomp.decomposition_table)[masked]}


def add_in_place(graph_module: GraphModule, positions: Iterable[int]) -> None:
    """Has the graph write what it adds to the parameters at these positions over them, if it adds to them at its end.

    That is: in the matmul or scatter that makes the part, if one does; else in a pass over the sum. A sum that other
    rewriting has made into something else stays what it is, and its result is new memory. To be called in the graph's
    fake mode.
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
    alone = isinstance(part, Node) and len(part.users) == 1 and _dtype(part) == _dtype(total)
    add = ADDING.get(part.target) if alone else None
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
    node.meta["val"] = target(*map_arg(args, lambda each: each.meta["val"]))
    return node


def _matmul(graph: Graph, total: Node, left: Node, right: Node) -> bool:
    _have_inductor_call(torch.ops.aten.addmm_.default)
    _call(graph, torch.ops.aten.addmm_.default, total, left, right)
    return True


def _have_inductor_call(target: Any) -> None:
    """Of its own accord it calls PyTorch for what it has no lowering of, unless CI is set in the environment.

    Then it takes this for an oversight of PyTorch's own developers, and raises.
    """
    from torch._inductor import lowering

    inductor: Any = lowering
    if target not in inductor.lowerings:
        inductor.make_fallback(target, warn=False)


def _scatter(
    graph: Graph, total: Node, base: Node, indices: list[Node | None], values: Node, accumulate: bool = False
) -> bool:
    if not accumulate or not _is_zero(base):
        return False
    _call(graph, torch.ops.aten.index_put_.default, total, indices, values, True)
    return True


def _is_zero(node: Node) -> bool:
    return node.target is torch.ops.aten.full.default and node.args[1] in (0, 0.0)


ADDING: Final[Mapping[Any, Callable[..., bool]]] = {
    torch.ops.aten.mm.default: _matmul,
    torch.ops.aten.index_put.default: _scatter,
    torch.ops.aten._unsafe_index_put.default: _scatter,
}
