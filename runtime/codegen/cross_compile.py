"""Inductor's kernels of a function for a GPU that is not present.

This is the only file that makes them: tensors are fake, Inductor's questions about the device are answered from a
table, and its work on the device itself (folding constants, benchmarking, loading) is left out. All of this is private
to PyTorch, so the names relied on are looked up first, and a version that lacks one is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final, cast
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from moaic.ir.attention import causal_divisor
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Function
from moaic.ir.types import FLOAT8
from moaic.runtime.codegen import recurrent_layers
from moaic.runtime.codegen.device_guard import register_device_guard
from moaic.runtime.codegen.gpu_answers import check_names, decompositions, gpu_answers, settings
from moaic.runtime.codegen.lower_to_fx import trace
from moaic.runtime.dtypes import DTYPE_NAMES
from moaic.runtime.host.gpu_specs import Target
from moaic.runtime.kernels.dispatch import with_measured_kernels
from moaic.runtime.protocol.aten_schema import signature_of

GPU: Final = torch.device("cuda", 0)
"""PyTorch's name of the device, for AMD's GPUs too."""

NEEDED: Final = (
    "torch._inductor.compile_fx:_recursive_post_grad_passes",
    "torch._inductor.debug:DebugContext",
    "torch._inductor.fx_passes.joint_graph:joint_graph_passes",
    "torch._inductor.graph:GraphLowering.codegen",
    "torch._inductor.scheduler:has_triton",
    "torch._inductor.ir:MultiOutput",
    "torch._inductor.scheduler:ExternKernelSchedulerNode",
    "torch._inductor.codegen.triton:TritonScheduling.define_kernel",
    "torch._inductor.codecache:PyCodeCache.load",
    "torch._inductor.runtime.hints:DeviceProperties.create",
    "torch._inductor.runtime.triton_helpers:set_driver_to_gpu",
    "torch._inductor.runtime.triton_heuristics:CachingAutotuner._precompile_config",
    "torch._inductor.runtime.triton_heuristics:StaticTritonCompileResult.can_statically_launch",
    "torch.utils._triton:triton_hash_with_backend",
    "torch.cuda:get_device_properties",
    "torch.cuda:get_device_capability",
    "torch.cuda:current_device",
    "torch._decomp:decomposition_table",
)
"""Every private name used here, and by `triton_aot` on the kernels made here, as `module:name`."""

ATTENTION: Final = frozenset(
    f"_scaled_dot_product_{kind}_attention{way}" for kind in ("flash", "efficient") for way in ("", "_backward")
)

PRODUCTS: Final = frozenset({"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm"})

RECURRENT: Final = frozenset({"recurrent", "recurrent_backward"})

HEAVY: Final = PRODUCTS | ATTENTION | RECURRENT | {"convolution", "convolution_backward"}


@dataclass(frozen=True, slots=True)
class Generated:
    """A kernel of a function: Triton's, with its source, or a call into the maker's library, without."""

    name: str
    source: str | None
    calls: int
    """Calls in one run of the function."""
    ops: tuple[str, ...]
    """The aten ops that it computes, each once."""
    nbytes: float
    """Read and written by one call."""
    flops: float
    """FLOPs of one call."""
    heavy: str | None
    """The element type of the matrix product that it is, if it is one."""


def generated(function: Function, target: Target) -> list[Generated]:
    """The kernels of a function of local types, in order of their first call. Raises Diagnostic."""
    check_names(NEEDED)
    register_device_guard()
    if not target.has_float8 and any(value.type.dtype in FLOAT8 for value in function.values()):
        raise Diagnostic(
            f"@{function.name} computes in eight-bit floats, and {target.device} ({target.name}) has none",
            hint="take another --target, or the plan of a step in bfloat16",
        )
    with _answering(target) as kernels:
        return _counted(_lowered(with_measured_kernels(function, target.name), kernels))


@contextmanager
def _answering(target: Target) -> Generator[dict[Any, tuple[str, str]]]:
    """Inductor believes that the target is there; for each scheduled node its kernel's name and source are noted."""
    from torch import _decomp
    from torch._inductor import config
    from torch._inductor.codegen import triton
    from torch._inductor.utils import Placeholder

    kernels: dict[Any, tuple[str, str]] = {}
    scheduling: Any = triton.TritonScheduling
    define = scheduling.define_kernel

    def noting(self: Any, source: str, schedule: Sequence[Any], *rest: Any, **more: Any) -> str:
        name: str = define(self, source, schedule, *rest, **more)
        for placeholder in (Placeholder.DESCRIPTIVE_NAME, Placeholder.KERNEL_NAME):
            source = source.replace(str(placeholder), name)
        kernels.update((node, (name, source)) for node in schedule)
        return name

    answers = (*gpu_answers(target), (scheduling, "define_kernel", noting))
    patch = cast("Callable[[dict[str, object]], Any]", config.patch)
    with ExitStack() as stack:
        for owner, name, answer in answers:
            stack.enter_context(mock.patch.object(owner, name, answer))
        table = cast("dict[Any, Any]", _decomp.decomposition_table)
        stack.enter_context(mock.patch.dict(table, decompositions()))
        stack.enter_context(patch({**settings()}))
        yield kernels


def _lowered(function: Function, kernels: Mapping[Any, tuple[str, str]]) -> list[Generated]:
    """The kernels of Inductor's schedule, in order; the kernels' sources are added to `kernels` on the way."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import compile_fx
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    with torch.no_grad():
        module, fake_mode = trace(function, GPU, select_decomp_table())
        with tracing(TracingContext(fake_mode)), fake_mode, V.set_fake_mode(fake_mode):
            joint_graph_passes(module)
            passes: Any = compile_fx._recursive_post_grad_passes  # pyright: ignore[reportPrivateUsage]
            passes(module, is_inference=True)
            examples = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
            graph: Any = GraphLowering(
                module, example_inputs=examples, shape_env=fake_mode.shape_env, is_inference=True
            )
            with V.set_graph_handler(graph), V.set_extern_kernel_nodes([]), V.set_debug_handler(DebugContext()):
                graph.run(*examples)
                graph.codegen()
                return [row for node in graph.scheduler.nodes if (row := _kernel(node, kernels)) is not None]


def _kernel(node: Any, kernels: Mapping[Any, tuple[str, str]]) -> Generated | None:
    """The kernel of one node of the schedule; None for a node that runs nothing."""
    from torch._inductor.ir import MultiOutput
    from torch._inductor.scheduler import ExternKernelSchedulerNode

    parts: list[Any] = node.get_nodes()
    name, source = next((kernels[part] for part in parts if part in kernels), ("", None))
    if not name:
        # Each of several results of a call is a node too.
        if not isinstance(node, ExternKernelSchedulerNode) or isinstance(node.node, MultiOutput):
            return None
        name = str(parts[0].node.python_kernel_name or parts[0].node.op_overload)
    origins: list[Any] = [origin for part in parts for origin in part.node.get_origins()]
    computed = [origin for origin in dict.fromkeys(origins) if _flops(origin)]
    products = [origin for origin in computed if _packet(origin) in HEAVY] if source is None else []
    # What else such a call is said to come from, its operands were made of by other kernels; and these are said to come
    # from it too.
    computed = products or [origin for origin in computed if _packet(origin) not in ATTENTION | RECURRENT]
    return Generated(
        name,
        source,
        1,
        tuple(dict.fromkeys(_packet(origin) for origin in computed)),
        float(node.get_read_write_buffers_sizes()),
        sum(map(_flops, computed)),
        _dtype(products[0]) if products else None,
    )


def _counted(rows: Sequence[Generated]) -> list[Generated]:
    """Kernels that are called several times once, with the number of calls."""
    found: dict[tuple[str, float, float], Generated] = {}
    for row in rows:
        key = (row.name, row.nbytes, row.flops)
        calls = found[key].calls + 1 if key in found else 1
        found[key] = replace(row, calls=calls)
    return list(found.values())


def _packet(node: Any) -> str:
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0]


def _dtype(node: Any) -> str:
    """The element type of a matrix product's operands."""
    return DTYPE_NAMES[next(iter(node.all_input_nodes)).meta["val"].dtype]


def _is_causal(node: Any) -> bool:
    if _packet(node) not in ATTENTION:
        return False
    return bool(dict(zip(signature_of(node.target).names, node.args, strict=False)).get("is_causal", False))


def _example(value: Any) -> Any:
    """The fake tensor of a node; any other value as it is."""
    return value.meta["val"] if hasattr(value, "meta") else value


def _flops(node: Any) -> float:
    """Operations of an FX node: those of matrix products by their sizes, else one per element read or written."""
    value: Any = node.meta.get("val")
    if node.op != "call_function" or getattr(node.target, "is_view", False) or value is None:
        return 0.0
    packet = getattr(node.target, "overloadpacket", None)
    if packet is torch.ops.aten._grouped_mm:
        # Each row is multiplied by one matrix. The registry does not know the op.
        left, right = (_example(each) for each in node.args[:2])
        return 2.0 * left.numel() * right.shape[-1]
    if _packet(node) in RECURRENT:
        return recurrent_layers.flops(*tree_map(_example, node.args))
    count = flop_registry.get(packet)
    if count is not None:
        given, named = tree_map(_example, (node.args, node.kwargs))
        # The registry counts all pairs of a query and a key.
        return float(count(*given, **named, out_val=value)) / causal_divisor(_is_causal(node))
    values: list[Any] = [each.meta["val"] for each in (*node.all_input_nodes, node)]
    return float(max(prod(each.shape) for each in tree_leaves(values) if isinstance(each, Tensor)))
