"""Compute functions made ready to run: interpreted op by op through torch, or compiled by Inductor.

Inductor keeps its results on disk under a hash of the graph: another process that compiles an equal function of equal
local shapes with as many threads pays for the look-up alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from math import lcm
from typing import Any, Final

import torch
from torch import Tensor

from moaic.ir.accumulation import overwritten
from moaic.ir.graph import Function, Op, Value
from moaic.ir.specialize import Specializer, sizes_of
from moaic.ir.symbols import Numbers, Symbols
from moaic.ir.types import TensorType
from moaic.runtime.codegen.integer_division import cache_tag
from moaic.runtime.codegen.lower_to_fx import CPU, ComputeFunction, Numbering, add_in_place, run_ops, scatters, trace
from moaic.runtime.host.disk import disk_errors_named
from moaic.runtime.kernels.dispatch import with_measured_kernels
from moaic.runtime.kernels.triton_launch import target_of

SETTINGS: Final[Mapping[str, Any]] = {"freezing": False, "fx_graph_cache": True, "cpp_wrapper": False}
"""Inductor's settings on which correctness depends: parameters are arguments, and results are cached."""

_OUTSIDE: Final = re.compile(r"index out of bounds: 0 <= .* < (\d+)")
"""The assertion of a CPU kernel of Inductor's: an index, and the size it must be below."""


def compile_function(function: Function, *, compiled: bool, device: torch.device = CPU) -> ComputeFunction:
    """A callable for `function`, whose types are local: from the parameters' tensors to the results', in order.

    Parameters may have any strides; results of a compiled function are contiguous. A result may be (a view of) a
    parameter or of another result, so a caller that overwrites tensors in place must own them. Threads and the device
    are those at the time of the call. No gradients are recorded.
    """
    (run,) = compile_functions([function], compiled=compiled, device=device)
    return run


def compile_functions(
    functions: Sequence[Function], *, compiled: bool, device: torch.device = CPU
) -> list[ComputeFunction]:
    """A callable for each function. What is compiled together here is found again together."""
    if not compiled:
        return [_interpreted(function, device) for function in functions]
    return [_compiled(kernel.run) for kernel in _built([partial(_inductor, each, device) for each in functions])]


def prepare_functions(
    functions: Sequence[Function], symbols: Symbols | None, *, compiled: bool, device: torch.device = CPU
) -> list[Callable[[Numbers], ComputeFunction]]:
    """For each function, from numbers of the symbols to a callable as of `compile_function`.

    `symbols` is None where all sizes are numbers. What is prepared together here is found again together.
    """
    if symbols is None:
        return [_always(run) for run in compile_functions(functions, compiled=compiled, device=device)]
    if not compiled:
        return [partial(_interpreted_at, function, device) for function in functions]
    opened = OpenFunctions(functions, symbols, device)
    return [partial(opened.at, index) for index in range(len(functions))]


def _always(run: ComputeFunction) -> Callable[[Numbers], ComputeFunction]:
    return lambda numbers: run


def _interpreted_at(function: Function, device: torch.device, numbers: Numbers) -> ComputeFunction:
    return _interpreted(Specializer(numbers).function(function), device)


def _built(make: Sequence[Callable[[], InductorFunction]]) -> list[InductorFunction]:
    from moaic.runtime.codegen.inductor_cpp import Batch

    batch = Batch()
    with disk_errors_named(_where_compilers_write):
        with batch.collecting():
            kernels = [each() for each in make]
        batch.build()
    return kernels


def _where_compilers_write() -> str:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return (
        f"where compiled functions are kept ({cache_dir()}) or compilers work ({tempfile.gettempdir()}): free space "
        "there, set TORCHINDUCTOR_CACHE_DIR and TMPDIR to other folders, or MOAI_COMPILE=0"
    )


@dataclass(frozen=True, slots=True)
class InductorFunction:
    """A function that Inductor has compiled."""

    run: Callable[[list[Any]], Sequence[Tensor]]
    """From the numbers of the symbols and the parameters; may empty the list."""
    holds: Callable[[Sequence[int]], bool] = lambda _: True
    """Whether it is right for these numbers of the symbols: Inductor decides some things by their size."""


class OpenFunctions:
    """Functions with open sizes, each compiled for as many sizes as one kernel serves."""

    def __init__(self, functions: Sequence[Function], symbols: Symbols, device: torch.device = CPU) -> None:
        """Compiles all of them for the sizes of the example."""
        self._device = device
        self._parts = [(function, _numbering(function, symbols)) for function in functions]
        kernels = _built([partial(_inductor, function, device, numbering) for function, numbering in self._parts])
        self._kernels = [[kernel] for kernel in kernels]

    @property
    def kernels(self) -> int:
        """Number of kernels so far, of all functions."""
        return sum(map(len, self._kernels))

    def at(self, index: int, numbers: Numbers) -> ComputeFunction:
        """A callable for a function where the symbols have these numbers; compiles if no kernel is right for them."""
        function, numbering = self._parts[index]
        given = numbering.inputs(numbers)
        kernel = next((each for each in self._kernels[index] if each.holds(given)), None)
        if kernel is None:
            here = replace(numbering, example={name: numbers[name] for name in numbering.example})
            (kernel,) = _built([partial(_inductor, function, self._device, here)])
            self._kernels[index].append(kernel)
        return _compiled(partial(_with_numbers, kernel.run, given))


def _with_numbers(
    run: Callable[[list[Any]], Sequence[Tensor]], numbers: Sequence[int], tensors: list[Tensor]
) -> Sequence[Tensor]:
    arguments = [*numbers, *tensors]
    tensors.clear()
    return run(arguments)


def _scales(function: Function) -> dict[str, int]:
    """For each symbol of which a fraction is a size, the number of which it is a multiple."""
    scales: dict[str, int] = {}
    for size in sizes_of(function):
        (names, coefficient), *more = size.terms
        if len(names) == 1 and not more:
            scales[names[0]] = lcm(scales.get(names[0], 1), coefficient.denominator)
    return scales


def _numbering(function: Function, symbols: Symbols) -> Numbering:
    """That of the function alone: what else is compiled with it, which differs between hosts, changes no bit."""
    used = {name for size in sizes_of(function) for names, _ in size.terms for name in names}
    example = {name: number for name, number in symbols.example_numbers().items() if name in used}
    return Numbering(example, _scales(function))


def import_compiler() -> None:
    """Imports the modules that compiling needs."""
    from torch import hub

    # Otherwise its progress bars start a thread, and a process that forks must have one thread alone.
    hub.tqdm.monitor_interval = 0  # pyright: ignore[reportPrivateImportUsage]
    for name in ("torch._inductor.compile_fx", "torch.fx.experimental.proxy_tensor"):
        import_module(name)
    # It would print a traceback for each file that it cannot write, and goes on without.
    logging.getLogger("torch._inductor.codecache").setLevel(logging.ERROR)


def warm_compiler() -> None:
    """Fills the tables that the compiler makes when it is first used."""
    from moaic.runtime.codegen.inductor_cpp import Batch

    x, y = (Value(TensorType("f32", (64,))) for _ in range(2))
    with Batch().collecting():
        _inductor(Function("warm_up", (x,), (Op("aten.neg", (x,), (y,)),), (y,)), CPU)


def precompile_headers() -> None:
    """Has the C++ compiler precompile the headers of all kernels, in a thread: it can take seconds."""
    from moaic.runtime.codegen import inductor_cpp

    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
    # The first program finds the same error and reports it.
    with contextlib.suppress(Exception):
        inductor_cpp.precompile_headers()


def _interpreted(function: Function, device: torch.device) -> ComputeFunction:
    def run(inputs: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return run_ops(function, inputs, device)

    return run


def _compiled(kernel: Any) -> ComputeFunction:
    def run(inputs: list[Tensor]) -> list[Tensor]:
        arguments = [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in inputs]
        # The kernel releases each argument after its last use, if nothing else holds it.
        inputs.clear()
        try:
            return list(kernel(arguments))
        except RuntimeError as error:
            if (same := _as_of_an_op(error)) is None:
                raise
            raise same from error

    return run


def _as_of_an_op(error: RuntimeError) -> Exception | None:
    """The exception of the op behind an assertion of a compiled kernel, without lines of generated code."""
    if outside := _OUTSIDE.search(str(error)):
        return IndexError(f"index out of range: one is negative, or not below {outside[1]}")
    return RuntimeError("ZeroDivisionError") if "ZeroDivisionError" in str(error) else None


def _with_kernels(function: Function, device: torch.device) -> Function:
    """`function` with the kernels that were measured to win on this GPU."""
    return with_measured_kernels(function, target_of(device)) if device.type == "cuda" else function


def _inductor(function: Function, device: torch.device, numbering: Numbering | None = None) -> InductorFunction:
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    from moaic.runtime.codegen.scatter_order import CACHE_TAG

    if numbering is None:
        function = _with_kernels(function, device)
    compiler: Any = torch.compiler.config
    tagged = compiler.patch(cache_key_tag=f"{compiler.cache_key_tag}{CACHE_TAG}{cache_tag()}")
    with config.patch(dict(SETTINGS)), tagged, torch.no_grad():
        graph_module, fake_mode = trace(function, device, {**select_decomp_table(), **scatters()}, numbering)
        with tracing(TracingContext(fake_mode)), fake_mode:
            joint_graph_passes(graph_module)
            add_in_place(graph_module, overwritten(function))
            output = graph_module.graph.output_node()
            # Inductor may choose the strides of results unless they are said to be seen.
            output.meta["user_visible_output_idxs"] = list(range(len(function.results)))
            examples = [node.meta["val"] for node in graph_module.graph.nodes if node.op == "placeholder"]
            compiled = compile_fx_inner(graph_module, examples, is_inference=True)
        return (
            InductorFunction(compiled, _guard(fake_mode.shape_env, examples))
            if numbering
            else InductorFunction(compiled)
        )


def _guard(shape_env: Any, examples: Sequence[Any]) -> Callable[[Sequence[int]], bool]:
    """Whether a kernel is right for other numbers of its symbols, by what the compiler has asked of them."""
    symbols = [each for each in examples if not isinstance(each, Tensor)]
    text = shape_env.produce_guards_expression(symbols, ignore_static=False)
    if text is None:
        return lambda numbers: True
    return lambda numbers: bool(shape_env.evaluate_guards_expression(text, numbers))
