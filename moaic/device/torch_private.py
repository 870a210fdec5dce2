"""PyTorch's private API, as far as the device uses it: no other file of the device touches it.

Written for PyTorch 2.13; tests/device, which check each name, pass with 2.11 too.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial, wraps
from types import FrameType, FunctionType
from typing import Any, Final

import torch
from torch.autograd import forward_ad
from torch.utils import backend_registration, checkpoint

from moaic.support.traces import shorten

NAME: Final = "moai"

DEVICE: Final = torch.device("privateuseone", 0)
"""PyTorch's own name of the device, valid before it is renamed to `moai`; the two are equal afterwards."""

_torch: Final[Any] = torch
_C: Final[Any] = _torch._C
_registration: Final[Any] = backend_registration
_forward_mode: Final[Any] = forward_ad
_checkpoint: Final[Any] = checkpoint

construct_storage: Final[Callable[[int, torch.device, int], Any]] = _C._construct_storage_from_data_pointer
"""Makes a storage of a given size on an address that is never read; attributes set on it live as long as it does."""

create_empty: Final[Callable[[Any, torch.dtype], torch.Tensor]] = _C._acc.create_empty_tensor
"""Makes a tensor of the device with a placeholder storage, which `set_geometry_kernel` replaces."""

SPARSE_KEYS: Final = ("SparsePrivateUse1", "SparseCsrPrivateUse1")
"""Dispatch keys of sparse tensors of the device."""

NESTED_KEY: Final = "NestedTensorPrivateUse1"
"""The dispatch key of nested tensors of the device that are made of strided ones."""

DIFFERENTIATED_TWICE: Final = "torch.compile with aot_autograd does not currently support double backward"
"""What PyTorch says where a derivative of a compiled graph is differentiated."""

next_sequence_number: Final[Callable[[], int]] = _C._autograd._get_sequence_nr
"""The number of the next node of autograd's graph that this thread makes."""

CPU_KEYS: Final[Any] = _C.DispatchKeySet(_C.DispatchKey.CPU)
"""Selects CPU kernels, for ops that touch only sizes, strides and the storage pointer."""

DEVICE_GUARD: Final[Any] = _C._acc.DeviceGuard
"""Base class of device guards: PyTorch calls `type_` to learn whose streams to switch."""

DEVICE_TYPE: Final[Any] = _C._autograd.DeviceType.PrivateUse1

swap_tensor_impl: Final[Callable[[torch.Tensor, torch.Tensor], None]] = _C._swap_tensor_impl
"""Exchanges the C++ tensors behind two Python tensors, also for all other references to them."""


def is_compiled_backward(node: Any, since: int) -> bool:
    """Whether a node of autograd's graph is the backward of a compiled graph, with a number not below `since`."""
    return node.name() == "CompiledFunctionBackward" and node._sequence_nr() >= since


def is_transforming() -> bool:
    """Whether custom ops are amid what they have no rules for: a transform of `torch.func`, or forward mode."""
    return _C._functorch.peek_interpreter_stack() is not None or _forward_mode._current_level >= 0


def is_of_many(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for many, as gradients do by `is_grads_batched`."""
    return _C._functorch.is_legacy_batchedtensor(tensor)


def is_intercepted() -> bool:
    """Whether a dispatch mode, a tracer's or one of the program, sees each op before the device does."""
    return _C._len_torch_dispatch_stack() > 0


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a tracer of graphs passes this tensor from op to op: it has no buffer."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(tensor, FakeTensor | FunctionalTensor)


def set_geometry_kernel() -> Callable[..., torch.Tensor]:
    """`set_(keys, tensor, storage, offset, size, strides)`: points a tensor at a storage and reads no element."""
    overload: Any = torch.ops.aten.set_.source_Storage_storage_offset
    return overload._handle.redispatch_boxed


increment_version: Final[Callable[[Any], None]] = _C._increment_version
"""Increments the version counters of a list of tensors, which backward checks; inference tensors have none."""


def share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have one storage."""
    return _C._is_alias_of(one, other)


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether another tensor has the storage of `tensor`."""
    storage: Any = tensor.untyped_storage()
    # Two references are the tensor's own and that of `storage`.
    return _C._storage_Use_Count(storage._cdata) > 2


def metadata_kernel(overload: Any) -> Callable[..., Any]:
    """The CPU kernel of an op that changes only geometry, called with the arguments of the op."""
    call = overload._handle.redispatch_boxed

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return call(CPU_KEYS, *args, **kwargs)

    return kernel


def composite_kernel(overload: Any) -> Callable[..., Any]:
    """The kernel of PyTorch that calls other ops; `decompose` would prefer what was written for tracers."""
    return partial(overload._op_dk, _C.DispatchKey.CompositeImplicitAutograd)


def compiled_for_accelerators() -> bool:
    """Whether this PyTorch was built for a real accelerator; the machine need not have one."""
    return bool(
        torch.version.cuda or torch.version.hip or getattr(torch.version, "xpu", None) or torch.backends.mps.is_built()
    )


def cuda_devices() -> int:
    """Number of visible CUDA or ROCm devices, without starting the driver's runtime; -1 if unknown."""
    cuda: Any = torch.cuda
    return int(cuda._device_count_amdsmi() if torch.version.hip else cuda._device_count_nvml())


def renamed() -> bool:
    """Whether PrivateUse1 already has a name of its own."""
    return bool(_C._get_privateuse1_backend_name() != "privateuseone")


def backend_name() -> str:
    return str(_C._get_privateuse1_backend_name())


def register_device(module: Any, guard: Any) -> None:
    """Rename PrivateUse1 to `moai`, with `module` as `torch.moai`; raises RuntimeError if it has another name."""
    _registration._setup_privateuseone_for_python_backend(NAME, backend_module=module, device_guard=guard)


def aten_ops() -> list[str]:
    """Every aten op as `aten::add.Tensor`."""
    return [name for name in _C._dispatch_get_all_op_names() if name.startswith("aten::")]


def has_kernel(name: str, key: str) -> bool:
    return bool(_C._dispatch_has_kernel_for_dispatch_key(name, key))


def gives_views(name: str) -> bool:
    """Whether a result of the op shares the memory of an argument that the op does not write."""
    packet, _, overload = name.partition(".")
    results: list[Any] = _C._get_schema(packet, overload).returns
    return any(result.alias_info is not None and not result.alias_info.is_write for result in results)


def overload_of(name: str) -> Any:
    """The overload named `aten::add.Tensor`; None if this PyTorch does not have it."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    except AttributeError:
        return None


_REGISTERED: Final[list[Any]] = []
"""Keeps registrations alive: PyTorch removes them when the library object is destroyed."""


class Registry:
    """Kernels registered under one dispatch key, for the lifetime of the process."""

    def __init__(self, namespace: str, key: str) -> None:
        self.key = key
        self.library = _C._dispatch_library("IMPL", namespace, key)
        _REGISTERED.append(self.library)

    def add(self, name: str, kernel: Callable[..., Any]) -> None:
        """`name` as in `aten::add.Tensor`."""
        self.library.impl(name, self.key, _untraced(_unseen_by_jit(kernel) if self.key == "PrivateUse1" else kernel))

    def fall_through(self) -> None:
        self.library.fallback_fallthrough(self.key)

    def fall_back(self, kernel: Callable[..., Any]) -> None:
        """`kernel(overload, *args, **kwargs)` for every op that has no kernel under the key."""
        self.library.fallback(self.key, _untraced(kernel))


def is_recorded_by_jit() -> bool:
    """Whether `torch.jit.trace` watches ops, also those that are called within the one that runs."""
    return _C._get_tracing_state() is not None


def _unseen_by_jit(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, during which `torch.jit.trace` pauses where it has recorded the op: it gives all sizes as tensors."""
    state, excluded, tracer = _C._get_tracing_state, _C._dispatch_tls_is_dispatch_key_excluded, _tracer()

    def run(*args: Any, **kwargs: Any) -> Any:
        trace = state()
        if trace is None or not excluded(tracer):
            return kernel(*args, **kwargs)
        _set_trace(None)
        try:
            return kernel(*args, **kwargs)
        finally:
            _set_trace(trace)

    return run


@cache
def _tracer() -> Any:
    return _C._dispatch_key_parse("Tracer")


def _set_trace(trace: Any) -> None:
    """PyTorch sets it nowhere but where ops are recorded."""
    tracer = _C.DispatchKeySet(_tracer())
    included, excluded = _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()
    with _C._ForceDispatchKeyGuard(included, excluded - tracer):
        _C._set_tracing_state(trace)


def _untraced(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, excluded from Dynamo's tracing, with short tracebacks of its errors.

    After a graph break Dynamo would trace the kernel, which the dispatcher calls, as if it were the user's function.
    """
    frames: Any = _C._dynamo.eval_frame

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return kernel(*args, **kwargs)
        except Exception as error:
            shorten(error)
            raise

    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(run.__code__, frames._FrameExecStrategy(skip, skip))
    return run


def without_key(key: str) -> Any:
    """A context in which the dispatcher ignores `key`."""
    return _C._ExcludeDispatchKeyGuard(_C.DispatchKeySet(getattr(_C.DispatchKey, key)))


def dynamo_backend(name: str) -> Callable[..., Any]:
    """The backend that `torch.compile(backend=name)` calls."""
    return _torch._dynamo.lookup_backend(name)


def compiler(
    backend: str,
    options: Mapping[str, object],
    leaves_alone: Callable[[FrameType], bool],
    on_refusal: Callable[[Exception], None],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compiles functions as `torch.compile` does, apart from all others: they share what is compiled, and its limit.

    By default PyTorch counts by code: the ninth of nine models whose classes share a decorator would not be compiled.
    Calls of functions that `leaves_alone` run as they are, with all that they call. So do those that Dynamo cannot
    trace, after `on_refusal` got its error. So does NumPy: PyTorch 2.13 traces `a[..., ::-1]` as a reversal of another
    dim, and loses what is written to a reversed view.
    """
    _hush_logs()  # not earlier: where the mode is on from the start, PyTorch makes its handlers after that
    wrapper = _torch._TorchCompileWrapper(backend, None, dict(options), None)
    is_apart = "isolate_recompiles" in inspect.signature(_torch.compile).parameters
    with _keeping_checks_of_distributions():
        made: Any = _torch._dynamo.optimize(wrapper, **{"isolate_recompiles": True} if is_apart else {})
    own = getattr(made, "context", made)  # autocast may be around it
    own.callback = _leaving_alone(own.callback, leaves_alone, on_refusal)
    return made


@contextmanager
def _keeping_checks_of_distributions() -> Generator[None]:
    """Dynamo switches the checks of their arguments off for the whole program when it is first used."""
    kind: Any = torch.distributions.Distribution
    before = kind._validate_args
    try:
        yield
    finally:
        kind.set_default_validate_args(before)


def _leaving_alone(
    callback: Callable[..., Any], leaves_alone: Callable[[FrameType], bool], on_refusal: Callable[[Exception], None]
) -> Callable[..., Any]:
    """Dynamo's conversion of a frame, but for some."""
    types: Any = importlib.import_module("torch._dynamo.types")
    rules: Any = importlib.import_module("torch._dynamo.trace_rules")
    config: Any = importlib.import_module("torch._dynamo.config")
    action = types.FrameAction.SKIP
    unchanged = types.ConvertFrameReturn(types.FrameExecStrategy(action, action), apply_to_code=False)

    @wraps(callback)
    def convert(frame: Any, *rest: Any) -> Any:
        # Of what Dynamo never converts, it looks for graphs in all that is called from there.
        if not rules.check(frame.f_code, frame=frame) and leaves_alone(frame):
            return unchanged
        try:
            with _hushed(), config.patch(trace_numpy=False):
                return callback(frame, *rest)
        except Exception as error:
            if not _is_tracing_error(error):
                raise
            # The frame may be what follows a graph break: what came before it has run, and must not run again.
            on_refusal(error)
            return unchanged

    vars(convert)["_torchdynamo_orig_backend"] = callback
    return convert


class _Conversion(threading.local):
    """Of this thread."""

    is_unasked = False
    """Whether Dynamo converts a frame for `compiler`, which no user calls."""


_CONVERSION: Final = _Conversion()


@contextmanager
def _hushed() -> Generator[None]:
    before, _CONVERSION.is_unasked = _CONVERSION.is_unasked, True
    try:
        yield
    finally:
        _CONVERSION.is_unasked = before


def _hush_logs() -> None:
    """Make Dynamo log nothing of what it converts for `compiler`, as nobody asked for that.

    What the user does ask for is written: by TORCH_LOGS, by `torch._logging.set_logs`, or by the level of a logger.
    """
    for handler in list(_logs().handlers):
        handler.addFilter(_is_written)


def hush_warnings() -> Callable[[], None]:
    """The same for Dynamo's own warnings; returns what undoes it."""
    return PatchPoint(importlib.import_module("torch._dynamo.utils"), "warn_once").patch(_quieter)


def _logs() -> Any:
    return importlib.import_module("torch._logging._internal")


def _is_hush() -> bool:
    state = _logs().log_state
    return _CONVERSION.is_unasked and not (state.log_qname_to_level or state.artifact_names)


def _is_written(record: logging.LogRecord) -> bool:
    # That of conversions warns of their limit: what comes then runs op by op.
    told = record.name == "torch._dynamo.convert_frame" or logging.getLogger(record.name).isEnabledFor(logging.INFO)
    return told or not _is_hush()


def _quieter(warn_once: Callable[..., None]) -> Callable[..., None]:
    @wraps(warn_once)
    def warn(message: str, stacklevel: int = 1) -> None:
        if not _is_hush():
            warn_once(message, stacklevel + 1)

    return warn


def _is_tracing_error(error: Exception) -> bool:
    """Whether Dynamo could not trace what may run: an op does not take the operands that it is traced with, most often.

    Or a guard fails at once: Dynamo computes on symbols what it then compares, and rounds otherwise than Python.
    """
    from torch._dynamo.exc import TorchRuntimeError

    return isinstance(error, TorchRuntimeError) or str(error).startswith("Guard failed on the same frame")


@contextmanager
def backend_replaced(name: str, backend: Callable[..., Any]) -> Generator[None]:
    """For the time of the block `torch.compile(backend=name)` calls another backend."""
    registry: Any = importlib.import_module("torch._dynamo.backends.registry")
    registry._BACKENDS.setdefault(name, None)
    before = registry._COMPILER_FNS.get(name)
    registry._COMPILER_FNS[name] = backend
    try:
        yield
    finally:
        registry._COMPILER_FNS.pop(name)
        if before is not None:
            registry._COMPILER_FNS[name] = before


def accumulate_node(parameter: torch.Tensor) -> Any:
    """The autograd node that accumulates `parameter.grad`."""
    return torch.autograd.graph.get_gradient_edge(parameter).node


_HOOKS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")


def hooks_of(parameter: torch.Tensor) -> dict[str, Any]:
    """The hooks on a tensor's gradient."""
    return {name: getattr(parameter, name) for name in _HOOKS}


def set_hooks(parameter: torch.Tensor, hooks: dict[str, Any]) -> None:
    """Set hooks that `hooks_of` returned before `swap_tensor_impl`."""
    for name, value in hooks.items():
        if value:
            setattr(parameter, name, value)


def backward_on_calling_thread() -> None:
    """Run backward() on the calling thread, which has the user's frames, instead of on one thread per device.

    It also avoids a race in torch: an engine thread that frees a graph while Python shuts down aborts the process.
    """
    _C._set_multithreading_enabled(False)


@dataclass(frozen=True, slots=True)
class PatchPoint:
    """A function of torch that does not support a device implemented in Python, and is replaced."""

    owner: Any
    name: str

    def patch(self, make: Callable[[Any], Any]) -> Callable[[], None]:
        """Replace the real function by `make(real)`; returns a function that restores it."""
        before = self.owner.__dict__.get(self.name, _INHERITED)
        ours = make(getattr(self.owner, self.name))
        setattr(self.owner, self.name, staticmethod(ours) if self.name == "__new__" else ours)

        def restore() -> None:
            if before is _INHERITED:
                delattr(self.owner, self.name)
            else:
                setattr(self.owner, self.name, before)

        return restore


_INHERITED: Final = object()
"""The owner inherits the attribute from a base class, or does not have it."""


STORAGE_NEW: Final = PatchPoint(torch.UntypedStorage, "__new__")
"""Crashes for a device without an allocator in C++."""

STORAGE_COPY: Final = PatchPoint(torch.UntypedStorage, "copy_")

STORAGE_WRITE: Final = PatchPoint(torch.UntypedStorage, "_write_file")
"""Called by pickle; makes a second storage on the address of the first."""

STORAGE_READ: Final = PatchPoint(torch.UntypedStorage, "_set_from_file")

STORAGE_ITEM: Final = PatchPoint(torch.UntypedStorage, "__getitem__")
"""Reads bytes from the storage's address."""

STORAGE_SWAP: Final = PatchPoint(torch.UntypedStorage, "byteswap")
"""Reads and writes bytes at the storage's address."""

MODULE_APPLY: Final = PatchPoint(torch.nn.Module, "_apply")
"""Called by every method that moves a module."""

LAZY_METHODS: Final = PatchPoint(_torch.nn.parameter.UninitializedTensorMixin, "_allowed_methods")
"""What may be called on a parameter that has no shape yet."""

MODULE_TO: Final = PatchPoint(torch.nn.Module, "to")

PROFILE: Final[type] = _torch.profiler.profiler._KinetoProfile
"""The base class of `torch.profiler.profile`."""

RUN_BACKWARD: Final = (
    PatchPoint(torch.autograd.graph, "_engine_run_backward"),
    PatchPoint(torch.autograd, "_engine_run_backward"),
)
"""Called by every function that computes gradients."""

PIN: Final = PatchPoint(torch.Tensor, "pin_memory")

PRINT: Final = PatchPoint(_torch._tensor_str, "_str")
"""Called by `repr` of a tensor; its frame holds a guard that turns `torch.func` off."""

PRINT_ELEMENTS: Final = PatchPoint(_torch._tensor_str, "_tensor_str")
"""Reads a tensor element by element."""

COMPILE_BY_DEFAULT: Final = PatchPoint(_torch._TorchCompileInductorWrapper, "__call__")
"""Called by `torch.compile` without a backend; generates code only for devices that Inductor knows."""

SCATTER: Final = PatchPoint(torch.nn.DataParallel, "scatter")
"""Cuts the arguments of a call into one part per device; it is built for CUDA alone."""

CURRENT_ACCELERATOR: Final = PatchPoint(_C, "_accelerator_getAccelerator")
"""Called by `torch.accelerator.current_accelerator()` and, in newer PyTorch, by `torch.get_device_module()`."""


CALL_COMPILED: Final = PatchPoint(torch.nn.Module, "_compiled_call_impl")
"""The compiled call of a module, which replaces its own code; None if there is none."""

CHECKPOINT: Final = PatchPoint(_checkpoint, "_checkpoint_without_reentrant_generator")
"""Gets what a checkpoint computes again as its first argument."""

CHECKPOINT_NESTED: Final = PatchPoint(_checkpoint.CheckpointFunction, "forward")
"""Gets it as its second one, for checkpoints with `use_reentrant=True`: these run a backward inside the backward."""

COMPILE_WRAPPER: Final = PatchPoint(_torch._TorchCompileWrapper, "__init__")
"""Looks up the backend of `torch.compile`; fails if two threads do so for the first time."""

CUDA_INIT: Final = PatchPoint(torch.cuda, "_lazy_init")
"""Called before the first use of CUDA, from Python and C++ alike."""

CUDA_IS_AVAILABLE: Final = torch.cuda.is_available
"""PyTorch's own function, also while it is patched for the program."""

ANY_ACCELERATOR: Final = PatchPoint(_C, "_get_accelerator")
"""The same for torch.distributed and others; the CPU if there is no accelerator."""


class _GeneratorType(type):
    """The metaclass of a Python stand-in for `torch.Generator`; its calls make real generators."""

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.Generator:
        return _C.Generator(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _C.Generator)


@cache
def generator_new() -> PatchPoint:
    """Called by `torch.Generator(...)`; a type of C++ alone, as in PyTorch 2.11, is replaced by a Python stand-in."""
    if type(torch.Generator) is type:
        _torch.Generator = _GeneratorType("Generator", (_C.Generator,), {"__module__": "torch"})
    return PatchPoint(type(torch.Generator), "__call__")


def accelerator_patch_points(name: str) -> tuple[PatchPoint, ...]:
    """Each module of torch.accelerator that has a function of this name."""
    modules = (torch.accelerator, torch.accelerator.memory)
    return tuple(PatchPoint(module, name) for module in modules if hasattr(module, name))


def dynamo_optimize() -> PatchPoint:
    """Called by `torch.compile` with a backend that knows its options, before it gets a model."""
    return PatchPoint(importlib.import_module("torch._dynamo"), "optimize")


def device_context() -> PatchPoint:
    """Called by `with torch.device(...)` and `torch.set_default_device`."""
    return PatchPoint(importlib.import_module("torch.utils._device").DeviceContext, "__init__")


def is_cuda_in_graphs() -> PatchPoint:
    """The value of `tensor.is_cuda` while Dynamo traces."""
    return PatchPoint(importlib.import_module("torch._dynamo.variables").TensorVariable, "method_attr_is_cuda")


def symbol_as_tensor() -> PatchPoint:
    """The tensor in which Dynamo returns a float from a graph that computes it."""
    return PatchPoint(importlib.import_module("torch._dynamo.variables").SymNodeVariable, "as_tensor")


def traced_constant(translator: Any, value: object) -> Any:
    """A constant as Dynamo represents it, for the translator that traces."""
    return importlib.import_module("torch._dynamo.variables.base").VariableTracker.build(translator, value)


_SCALAR_TENSOR: Final = torch.scalar_tensor
"""PyTorch's own function, also while it is patched for the program."""


def as_tensor_in_graphs(symbol: Any, translator: Any, dtype: torch.dtype) -> Any:
    """`SymNodeVariable.as_tensor` while `torch.scalar_tensor` is patched by a function of Python.

    Dynamo calls it after the last instruction, when it traces into no such function any more: None would be returned.
    """
    if symbol._tensor_var is None:
        function, named = traced_constant(translator, _SCALAR_TENSOR), {"dtype": traced_constant(translator, dtype)}
        symbol._tensor_var = function.call_function(translator, [symbol], named)
    return symbol._tensor_var


def read_tables_of_functions() -> None:
    """Fill PyTorch's tables of functions now: it identifies some functions by identity and fills each table once."""
    rules, overrides = importlib.import_module("torch._dynamo.trace_rules"), _torch.overrides
    for table in (
        rules.get_torch_obj_rule_map,
        rules.get_tensor_method,
        overrides.get_ignored_functions,
        overrides.get_testing_overrides,
        overrides.get_overridable_functions,
        importlib.import_module("torch._dynamo.variables.torch").TorchInGraphFunctionVariable._get_handlers,
        importlib.import_module("torch.utils._device")._device_constructors,
    ):
        table()


def is_traced_by_fx() -> bool:
    """Whether FX traces the calls of this process, as `make_fx` does; it traces no compiled call."""
    tracing: Any = importlib.import_module("torch.fx._symbolic_trace")
    return tracing.is_fx_symbolic_tracing()


def has_hooks_on_saved_tensors() -> bool:
    """Whether a person's hooks get what ops save for the backward; those of PyTorch (checkpoints) do not count."""
    hooks: Any = _C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and not str(getattr(hooks[0], "__module__", "")).startswith("torch.")


def has_hooks_of_all_modules() -> bool:
    """Whether hooks are set that the call of any module runs."""
    return bool(_torch.nn.modules.module._has_any_global_hook())


def is_functional_call(compiled: FrameType | None) -> bool:
    """Whether a module's compiled call, whose frame this is, is made by `torch.func.functional_call`."""
    module = compiled and compiled.f_back
    caller = module and module.f_back
    return caller is not None and caller.f_code is _torch.nn.utils.stateless._functional_call.__code__


def is_among_compiled_outputs(tensor: torch.Tensor) -> bool:
    """Whether a compiled graph returned this tensor beside others that may have gradients."""
    node: Any = tensor.grad_fn
    if node is None or node.name() != "CompiledFunctionBackward":
        return False
    return sum(each.dtype.is_floating_point for each in getattr(node, "_input_metadata", ())) > 1


def values_in(arguments: object) -> list[Any]:
    """The values in nested lists, dictionaries and what else is registered as a container."""
    from torch.utils import _pytree

    return _pytree.tree_leaves(arguments)


def moved(arguments: Any, device: str) -> Any:
    """The same containers with all tensors in them on a device."""
    from torch.utils import _pytree

    return _pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), arguments)


def call_of(module: torch.nn.Module) -> Callable[..., Any]:
    """The module's call without the compiled one, hooks included."""
    ours: Any = module
    return ours._call_impl


def is_seen_by_dynamo(module: torch.nn.Module) -> bool:
    """Whether Dynamo traces the module's forward; it skips modules of PyTorch itself."""
    rules = importlib.import_module("torch._dynamo.trace_rules")
    return not rules.check(module.forward)


def watch_hooks() -> Callable[[], None]:
    """Make Dynamo see hooks that modules get or lose after they were compiled; returns what undoes it.

    By default it leaves out the check at each call that there still are none.
    """
    config: Any = importlib.import_module("torch._dynamo.config")
    before = config.skip_nnmodule_hook_guards
    config.skip_nnmodule_hook_guards = False
    return lambda: setattr(config, "skip_nnmodule_hook_guards", before)


def pass_over(function: Any) -> None:
    """Make Dynamo run a function eagerly after a graph break instead of starting a graph in it."""
    if isinstance(function, FunctionType):
        importlib.import_module("torch._dynamo.eval_frame").skip_code(function.__code__)


def script_as(ours: object, real: object) -> Callable[[], None]:
    """Make TorchScript take a replacement for the operator that the real function is; return a function that undoes it.

    TorchScript knows operators by the identity of their functions.
    """
    builtins: Any = importlib.import_module("torch.jit._builtins")
    table, operator = builtins._get_builtin_table(), builtins._find_builtin(real)
    if operator is None:
        return lambda: None
    table[id(ours)] = operator
    return lambda: table.pop(id(ours), None)


def is_module_of_a_compiler(module: torch.nn.Module) -> bool:
    """Whether a compiler made the module; such a module has a call of its own."""
    return isinstance(module, (torch.jit.ScriptModule, _torch.fx.GraphModule, _torch._dynamo.OptimizedModule))
