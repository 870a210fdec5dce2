"""The only place that touches PyTorch's private device API: everything else in the device goes through these names.

Measured on PyTorch 2.13. What each name must do is held by tests/device, which pass with 2.11 too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any, Final

import torch
from torch.utils import backend_registration

NAME: Final = "moai"

DEVICE: Final = torch.device("privateuseone", 0)
"""PyTorch's name of the kind of device that `moai` is, known before it has the name; they are equal afterwards."""

_torch: Final[Any] = torch
_C: Final[Any] = _torch._C
_registration: Final[Any] = backend_registration

construct_storage: Final[Callable[[int, torch.device, int], Any]] = _C._construct_storage_from_data_pointer
"""A storage on an address that is never read, of so many bytes. Attributes set on it live as long as the storage."""

create_empty: Final[Callable[[Any, torch.dtype], torch.Tensor]] = _C._acc.create_empty_tensor
"""A tensor of the device without a storage worth the name; `set_geometry` gives it one."""

SPARSE_KEYS: Final = ("SparsePrivateUse1", "SparseCsrPrivateUse1")
"""What ops on sparse tensors of the device are dispatched by."""

CPU_KEYS: Final[Any] = _C.DispatchKeySet(_C.DispatchKey.CPU)
"""The CPU's kernels, for ops that touch nothing but sizes, strides and the storage pointer."""

DEVICE_GUARD: Final[Any] = _C._acc.DeviceGuard
"""Base of what PyTorch asks, by a method `type_`, which device's streams to switch."""

DEVICE_TYPE: Final[Any] = _C._autograd.DeviceType.PrivateUse1

swap_tensor_impl: Final[Callable[[torch.Tensor, torch.Tensor], None]] = _C._swap_tensor_impl
"""Exchange what two tensor objects stand for, whoever else refers to them."""


def is_transforming() -> bool:
    """Whether a transform of `torch.func` is at work, which takes custom ops for what cannot be differentiated."""
    return _C._functorch.peek_interpreter_stack() is not None


def set_geometry_kernel() -> Callable[..., torch.Tensor]:
    """`set_(keys, tensor, storage, offset, size, strides)`: points a tensor at a storage and reads no element."""
    overload: Any = torch.ops.aten.set_.source_Storage_storage_offset
    return overload._handle.redispatch_boxed


increment_version: Final[Callable[[Any], None]] = _C._increment_version
"""Note that tensors of a list are written, for backward to find out; tensors of inference have no version."""


def share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have one storage."""
    return _C._is_alias_of(one, other)


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether any other tensor has the storage of `tensor`; the object in Python that stands for it counts, too."""
    storage: Any = tensor.untyped_storage()
    return _C._storage_Use_Count(storage._cdata) > 2


def metadata_kernel(overload: Any) -> Callable[..., Any]:
    """The CPU kernel of an op that only changes geometry, called with the op's own arguments."""
    call = overload._handle.redispatch_boxed

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return call(CPU_KEYS, *args, **kwargs)

    return kernel


def compiled_for_accelerators() -> bool:
    """Whether this PyTorch was built for a real accelerator; the machine need not have one."""
    return bool(
        torch.version.cuda or torch.version.hip or getattr(torch.version, "xpu", None) or torch.backends.mps.is_built()
    )


def cuda_devices() -> int:
    """CUDA or ROCm devices that this process may see, asked without starting the driver's runtime; -1 if unknown."""
    cuda: Any = torch.cuda
    return int(cuda._device_count_amdsmi() if torch.version.hip else cuda._device_count_nvml())


def renamed() -> bool:
    """Whether PrivateUse1 already has a name of its own."""
    return bool(_C._get_privateuse1_backend_name() != "privateuseone")


def backend_name() -> str:
    return str(_C._get_privateuse1_backend_name())


def register_device(module: Any, guard: Any) -> None:
    """Rename PrivateUse1 to `moai`, with `module` as `torch.moai`; raises RuntimeError where another device took it."""
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
    """The overload called `aten::add.Tensor`; None for one that this PyTorch does not have."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    except AttributeError:
        return None


_REGISTERED: Final[list[Any]] = []
"""Keeps registrations: PyTorch takes them back when the object that made them goes."""


class Registry:
    """Kernels registered under one dispatch key; they last as long as the process."""

    def __init__(self, namespace: str, key: str) -> None:
        self.key = key
        self.library = _C._dispatch_library("IMPL", namespace, key)
        _REGISTERED.append(self.library)

    def add(self, name: str, kernel: Callable[..., Any]) -> None:
        """`name` as in `aten::add.Tensor`."""
        self.library.impl(name, self.key, _untraced(kernel))

    def fall_through(self) -> None:
        self.library.fallback_fallthrough(self.key)

    def fall_back(self, kernel: Callable[..., Any]) -> None:
        """`kernel(overload, *args, **kwargs)` for every op that has no kernel under the key."""
        self.library.fallback(self.key, _untraced(kernel))


def _untraced(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, which Dynamo lets run as it is.

    Behind a graph break it would take the kernel, called by the dispatcher, for a function of the person's.
    """
    frames: Any = _C._dynamo.eval_frame

    def run(*args: Any, **kwargs: Any) -> Any:
        return kernel(*args, **kwargs)

    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(run.__code__, frames._FrameExecStrategy(skip, skip))
    return run


def without_key(key: str) -> Any:
    """A context in which ops are dispatched as if no tensor had `key`."""
    return _C._ExcludeDispatchKeyGuard(_C.DispatchKeySet(getattr(_C.DispatchKey, key)))


def dynamo_backend(name: str) -> Callable[..., Any]:
    """What `torch.compile(backend=name)` calls."""
    return _torch._dynamo.lookup_backend(name)


def accumulate_node(parameter: torch.Tensor) -> Any:
    """The node by which backward adds to `parameter.grad`."""
    return torch.autograd.graph.get_gradient_edge(parameter).node


_HOOKS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")


def hooks_of(parameter: torch.Tensor) -> dict[str, Any]:
    """The hooks on a tensor's gradient."""
    return {name: getattr(parameter, name) for name in _HOOKS}


def set_hooks(parameter: torch.Tensor, hooks: dict[str, Any]) -> None:
    """Hang hooks that another implementation of the tensor had on the one that it has now."""
    for name, value in hooks.items():
        if value:
            setattr(parameter, name, value)


def backward_on_calling_thread() -> None:
    """From now on backward() runs on the thread that calls it, where the person's frames are, not on one per device.

    It also ends a race of torch's: a thread of the engine that lets go of a graph while Python shuts down aborts.
    """
    _C._set_multithreading_enabled(False)


@dataclass(frozen=True, slots=True)
class Seam:
    """A function of torch that cannot know of a device made in Python, and is replaced for its sake."""

    owner: Any
    name: str

    def take_over(self, make: Callable[[Any], Any]) -> Callable[[], None]:
        """Put what `make` makes of the real function in its place; the result, called, undoes that."""
        before = self.owner.__dict__.get(self.name, _INHERITED)
        ours = make(getattr(self.owner, self.name))
        setattr(self.owner, self.name, staticmethod(ours) if self.name == "__new__" else ours)

        def give_back() -> None:
            if before is _INHERITED:
                delattr(self.owner, self.name)
            else:
                setattr(self.owner, self.name, before)

        return give_back


_INHERITED: Final = object()
"""Stands for an attribute that the owner has from a base, or not at all."""


STORAGE_NEW: Final = Seam(torch.UntypedStorage, "__new__")
"""Crashes where a device has no allocator in C++."""

STORAGE_COPY: Final = Seam(torch.UntypedStorage, "copy_")

STORAGE_WRITE: Final = Seam(torch.UntypedStorage, "_write_file")
"""Behind pickle: makes a second storage on the first one's address."""

STORAGE_READ: Final = Seam(torch.UntypedStorage, "_set_from_file")

STORAGE_ITEM: Final = Seam(torch.UntypedStorage, "__getitem__")
"""Reads bytes where they stand."""

STORAGE_SWAP: Final = Seam(torch.UntypedStorage, "byteswap")
"""Reads and writes bytes where they stand."""

MODULE_APPLY: Final = Seam(torch.nn.Module, "_apply")
"""Behind every move of a module."""

MODULE_TO: Final = Seam(torch.nn.Module, "to")

RUN_BACKWARD: Final = (Seam(torch.autograd.graph, "_engine_run_backward"), Seam(torch.autograd, "_engine_run_backward"))
"""Behind every way to ask for gradients."""

PIN: Final = Seam(torch.Tensor, "pin_memory")

PRINT: Final = Seam(_torch._tensor_str, "_tensor_str")
"""Reads a tensor element by element."""

COMPILE_BY_DEFAULT: Final = Seam(_torch._TorchCompileInductorWrapper, "__call__")
"""Behind `torch.compile` without a backend: makes code for devices that Inductor knows."""

CURRENT_ACCELERATOR: Final = Seam(_C, "_accelerator_getAccelerator")
"""Behind `torch.accelerator.current_accelerator()`, and in newer PyTorch behind `torch.get_device_module()`, too."""

CALL_COMPILED: Final = Seam(torch.nn.Module, "_compiled_call_impl")
"""What a call of a module runs instead of its own code; None for nothing."""

CUDA_INIT: Final = Seam(torch.cuda, "_lazy_init")
"""Called before the first use of CUDA, from Python and C++ alike."""

CUDA_IS_AVAILABLE: Final = torch.cuda.is_available
"""The real question, whatever the program is told."""

ANY_ACCELERATOR: Final = Seam(_C, "_get_accelerator")
"""The same for torch.distributed and others, with the CPU where there is none."""


class _MadeInPython(type):
    """What makes generators where PyTorch itself has nothing in Python that does."""

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.Generator:
        return _C.Generator(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _C.Generator)


@cache
def generator_new() -> Seam:
    """Behind `torch.Generator(...)`; where that is a type of C++ alone, as in PyTorch 2.11, one that passes for it."""
    if type(torch.Generator) is type:
        _torch.Generator = _MadeInPython("Generator", (_C.Generator,), {"__module__": "torch"})
    return Seam(type(torch.Generator), "__call__")


def accelerator_seams(name: str) -> tuple[Seam, ...]:
    """The places where torch.accelerator keeps a function."""
    modules = (torch.accelerator, torch.accelerator.memory)
    return tuple(Seam(module, name) for module in modules if hasattr(module, name))


def dynamo_optimize() -> Seam:
    """What `torch.compile` calls, with a backend that knows its options, before a model is given to it."""
    return Seam(importlib.import_module("torch._dynamo"), "optimize")


def device_context() -> Seam:
    """Behind `with torch.device(...)` and `torch.set_default_device`."""
    return Seam(importlib.import_module("torch.utils._device").DeviceContext, "__init__")


def is_cuda_in_graphs() -> Seam:
    """What Dynamo takes `tensor.is_cuda` for while it traces."""
    return Seam(importlib.import_module("torch._dynamo.variables").TensorVariable, "method_attr_is_cuda")


def traced_constant(translator: Any, value: object) -> Any:
    """A value that Dynamo knows while it traces, made for the translator that asked."""
    return importlib.import_module("torch._dynamo.variables.base").VariableTracker.build(translator, value)


def read_tables_of_functions() -> None:
    """Have PyTorch note functions in its tables as they are now: it knows some by identity, and looks once."""
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


def call_of(module: torch.nn.Module) -> Callable[..., Any]:
    """The module's own code, hooks included."""
    ours: Any = module
    return ours._call_impl


def is_seen_by_dynamo(module: torch.nn.Module) -> bool:
    """Whether Dynamo traces the module's forward where it comes upon it; it passes over those of PyTorch itself."""
    rules = importlib.import_module("torch._dynamo.trace_rules")
    return not rules.check(module.forward)


def pass_over(function: Any) -> None:
    """Have Dynamo run a function as it is where a graph is broken, instead of starting a graph in it."""
    if isinstance(function, FunctionType):
        importlib.import_module("torch._dynamo.eval_frame").skip_code(function.__code__)


def is_module_of_a_compiler(module: torch.nn.Module) -> bool:
    """Whether the module is a product of a compiler, which has its own way to be called."""
    return isinstance(module, (torch.jit.ScriptModule, _torch.fx.GraphModule, _torch._dynamo.OptimizedModule))
