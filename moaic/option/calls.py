"""The table of mapped calls: factories, moves, types, mixed precision, files, `torch.cuda`, calls of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from itertools import chain
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, supported_activities

from moaic.device import torch_private
from moaic.device.identity import is_moai
from moaic.device.torch_private import NAME, PatchPoint
from moaic.option import cuda
from moaic.option.compile_modules import WRAPPERS, AutoCompile, left_alone, recomputes_alike
from moaic.option.devices import DEVICE, device_type, first, keyword, the_device, translated, type_of
from moaic.option.mapping import Make, Mapping, always
from moaic.option.output_hooks import warns

FACTORIES: Final = (
    "arange",
    "as_tensor",
    "asarray",
    "bartlett_window",
    "blackman_window",
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "hamming_window",
    "hann_window",
    "kaiser_window",
    "linspace",
    "logspace",
    "normal",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "range",
    "scalar_tensor",
    "sparse_bsc_tensor",
    "sparse_bsr_tensor",
    "sparse_compressed_tensor",
    "sparse_coo_tensor",
    "sparse_csc_tensor",
    "sparse_csr_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
    "zeros_like",
)
"""Functions of `torch` that take a device by keyword."""

METHODS: Final = (
    "new_empty",
    "new_empty_strided",
    "new_full",
    "new_ones",
    "new_tensor",
    "new_zeros",
)
"""Methods of tensors that take a device by keyword."""

_ON_ACCELERATOR: Final = '`device="cuda"` is the accelerator'


def mappings(auto_compile: AutoCompile) -> list[Mapping]:
    """All mapped calls; `auto_compile` is the mapping of a module's call."""
    ours = (_factories(), _moves(), _queries(), _hooks(), _mixed_precision(), _tools(), cuda.mappings())
    return [*chain.from_iterable(ours), *_module_calls(auto_compile)]


def _factories() -> Iterator[Mapping]:
    for name in FACTORIES:
        yield _mapping(torch, "torch", name, _ON_ACCELERATOR, keyword)
    for name in ("fftfreq", "rfftfreq"):
        yield _mapping(torch.fft, "torch.fft", name, _ON_ACCELERATOR, keyword)
    for name in METHODS:
        yield _mapping(torch.Tensor, "torch.Tensor", name, _ON_ACCELERATOR, keyword)
    yield Mapping("torch.Generator", "`cuda`: the CPU's generator", torch_private.generator_new(), _generator)
    meaning = "`cuda` is the accelerator"
    call = "with torch.device(...)"
    yield Mapping(call, f"{meaning}; so `torch.set_default_device`", torch_private.device_context(), _device_context)
    meaning = "CUDA's types are the accelerator's, on which tensors are then made"
    yield _mapping(torch, "torch", "set_default_tensor_type", meaning, _set_default_tensor_type)


def _moves() -> Iterator[Mapping]:
    yield _mapping(torch.Tensor, "torch.Tensor", "to", "`cuda` is the accelerator; so `Module.to`", first)
    yield _mapping(torch.Tensor, "torch.Tensor", "cuda", "to the accelerator; so `Module.cuda`", always(_tensor_cuda))
    meaning = "`cuda` is the accelerator for lazy modules, too"
    yield Mapping("torch.nn.LazyLinear(...).to", meaning, torch_private.LAZY_METHODS, _allowed_of_lazy)
    yield _mapping(torch.Tensor, "torch.Tensor", "type", "CUDA's types are the accelerator's", _tensor_type)
    yield _mapping(torch.UntypedStorage, "torch.UntypedStorage", "cuda", "to the accelerator", always(_storage_cuda))
    files = PatchPoint(torch.serialization, "default_restore_location")
    yield _mapping(torch.jit, "torch.jit", "load", "`map_location`: `cuda` is the accelerator", _jit_load)
    yield Mapping("torch.load", "`map_location` and places in the file: `cuda` is the accelerator", files, _restore)


def _queries() -> Iterator[Mapping]:
    yield _mapping(torch.Tensor, "torch.Tensor", "is_cuda", "True on the accelerator", _is_cuda)
    point = torch_private.is_cuda_in_graphs()
    yield Mapping("TensorVariable.method_attr_is_cuda of Dynamo", "True on the accelerator", point, _is_cuda_in_graphs)
    point = torch_private.symbol_as_tensor()
    meaning = "calls PyTorch's own `torch.scalar_tensor`"
    yield Mapping("SymNodeVariable.as_tensor of Dynamo", meaning, point, always(torch_private.as_tensor_in_graphs))


def _hooks() -> Iterator[Mapping]:
    meaning = "warns where a compiled model has computed with its output, too"
    for name in ("retain_grad", "register_hook"):
        yield _mapping(torch.Tensor, "torch.Tensor", name, meaning, warns)


def _mixed_precision() -> Iterator[Mapping]:
    meaning = "`cuda` is the accelerator"
    autocast = PatchPoint(torch.amp.autocast_mode.autocast, "__init__")
    yield Mapping("torch.autocast", f"{meaning}; so `torch.cuda.amp.autocast`", autocast, _autocast)
    scaler = PatchPoint(torch.amp.grad_scaler.GradScaler, "__init__")
    yield Mapping("torch.amp.GradScaler", f"{meaning}; so `torch.cuda.amp.GradScaler`", scaler, _grad_scaler)
    for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_dtype", "set_autocast_enabled"):
        yield _mapping(torch, "torch", name, meaning, device_type)
    yield _mapping(torch, "torch", "get_autocast_gpu_dtype", "the accelerator's", always(_get_autocast_dtype))
    yield _mapping(torch, "torch", "set_autocast_gpu_dtype", "the accelerator's", always(_set_autocast_dtype))


def _tools() -> Iterator[Mapping]:
    meaning = "records the host; `torch.moai.profiler` the workers, too"
    yield Mapping("torch.profiler.profile", meaning, PatchPoint(torch_private.PROFILE, "__init__"), _profile)
    if torch.distributed.is_available():
        meaning = "a group of one rank, whatever its backend: one process drives all devices"
        yield _mapping(torch.distributed, "torch.distributed", "init_process_group", meaning, _init_process_group)


def _module_calls(auto_compile: AutoCompile) -> Iterator[Mapping]:
    meaning = "a whole model on the accelerator is compiled when it is first called"
    yield Mapping("module(...)", meaning, torch_private.CALL_COMPILED, always(auto_compile))
    meaning = "what the backward computes again runs as it did in the forward"
    yield Mapping("torch.utils.checkpoint.checkpoint", meaning, torch_private.CHECKPOINT, recomputes_alike(0))
    nested = torch_private.CHECKPOINT_NESTED
    yield Mapping("torch.utils.checkpoint.CheckpointFunction", meaning, nested, recomputes_alike(1))
    meaning = "modules that TorchScript reads are not compiled"
    yield _mapping(torch.jit, "torch.jit", "script", meaning, _script)
    for name in ("trace", "trace_module"):
        yield _mapping(torch.jit, "torch.jit", name, meaning, _trace)
    meaning = "its module, with inputs moved to the accelerator: all devices are one"
    for wrapper in WRAPPERS:
        point = PatchPoint(wrapper, "forward")
        yield Mapping(f"torch.nn.{wrapper.__name__}", meaning, point, always(_data_parallel))


def _mapping(owner: Any, path: str, name: str, meaning: str, make: Make) -> Mapping:
    return Mapping(f"{path}.{name}", meaning, PatchPoint(owner, name), make)


def _generator(real: Any) -> Any:
    def generator(cls: Any, device: Any = "cpu") -> Any:
        return real(cls, "cpu" if is_moai(translated(device)) else device)

    def call(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # Other classes implemented in C++ share the constructor of torch.Generator.
        return (generator if cls is torch.Generator else real)(cls, *args, **kwargs)

    return call


def _device_context(real: Any) -> Any:
    def init(self: Any, device: Any) -> None:
        real(self, translated(device))

    return init


def _allowed_of_lazy(real: Sequence[Any]) -> Sequence[Any]:
    """What may be called on a parameter without a shape: PyTorch names the functions, and calls those mapped before."""
    return [*real, torch.Tensor.to, torch.Tensor.cuda]


def _tensor_cuda(
    self: torch.Tensor,
    device: Any = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
) -> torch.Tensor:
    where = the_device(device) if device is None or isinstance(device, int) else translated(device)
    return self.to(where, non_blocking=non_blocking, memory_format=memory_format)


def _tensor_type(real: Any) -> Any:
    def of_type(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        wanted = _cuda_type(dtype)
        if wanted is not None:
            return self.to(DEVICE, wanted.dtype, non_blocking=non_blocking)
        return real(self, dtype, non_blocking, **kwargs)

    return of_type


def _cuda_type(named: Any) -> cuda.LegacyTensorType | None:
    """`torch.cuda.FloatTensor` and similar: of the mode, PyTorch's own, or by name; None for anything else."""
    if isinstance(named, type):
        named = f"{named.__module__}.{named.__name__}"
    is_name = isinstance(named, str) and named.startswith("torch.cuda.")
    wanted = getattr(torch.cuda, named.removeprefix("torch.cuda."), None) if is_name else named
    return wanted if isinstance(wanted, cuda.LegacyTensorType) else None


def _set_default_tensor_type(real: Any) -> Any:
    is_default = False

    @wraps(real)
    def set_default_tensor_type(t: Any, /) -> None:
        nonlocal is_default
        wanted = _cuda_type(t)
        if wanted is not None:
            torch.set_default_dtype(wanted.dtype)
            torch.set_default_device(DEVICE)
        else:
            real(t)
            if is_default:
                torch.set_default_device(None)
        is_default = wanted is not None

    return set_default_tensor_type


def _storage_cuda(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
    return torch.UntypedStorage(self.nbytes(), device=DEVICE).copy_(self, non_blocking)


def _restore(real: Any) -> Any:
    def restore(storage: Any, location: str) -> Any:
        return real(storage, str(translated(location)))

    return restore


def _jit_load(real: Any) -> Any:
    @wraps(real)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        there = translated(map_location)
        if there is None or not is_moai(there):
            return real(f, map_location, *args, **kwargs)
        # The loader, in C++, knows no devices but PyTorch's own.
        return real(f, "cpu", *args, **kwargs).to(there)

    return load


def _is_cuda(real: Any) -> Any:
    def is_cuda(self: torch.Tensor) -> bool:
        return self.device.type == NAME or real.__get__(self)

    return property(is_cuda)


def _is_cuda_in_graphs(real: Any) -> Any:
    def method_attr_is_cuda(self: Any, tx: Any) -> Any:
        if self.device is not None and self.device.type == NAME:
            return torch_private.traced_constant(tx, True)
        return real(self, tx)

    return method_attr_is_cuda


def _autocast(real: Callable[..., None]) -> Any:
    def init(
        self: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        real(self, type_of(device_type), dtype, enabled, cache_enabled)

    return init


def _grad_scaler(real: Callable[..., None]) -> Any:
    def init(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        real(self, type_of(device), *args, **kwargs)

    return init


def _profile(real: Callable[..., None]) -> Any:
    @wraps(real)
    def init(self: Any, *, activities: Iterable[ProfilerActivity] | None = None, **kwargs: Any) -> None:
        known = supported_activities()
        real(self, activities=None if activities is None else [each for each in activities if each in known], **kwargs)

    return init


def _init_process_group(real: Callable[..., None]) -> Any:
    from moaic.option import one_rank

    return one_rank.init_process_group(real)


def _script(real: Callable[..., Any]) -> Any:
    @wraps(real)
    def script(*args: Any, _frames_up: int = 0, **kwargs: Any) -> Any:
        with left_alone():
            # TorchScript looks names up in the frame of its caller.
            return real(*args, _frames_up=_frames_up + 1, **kwargs)

    return script


def _trace(real: Callable[..., Any]) -> Any:
    @wraps(real)
    def trace(*args: Any, **kwargs: Any) -> Any:
        with left_alone():
            return real(*args, **kwargs)

    return trace


def _data_parallel(self: Any, *inputs: Any, **kwargs: Any) -> Any:
    return self.module(*torch_private.moved(inputs, NAME), **torch_private.moved(kwargs, NAME))


def _get_autocast_dtype() -> torch.dtype:
    return torch.get_autocast_dtype(NAME)


def _set_autocast_dtype(dtype: torch.dtype) -> None:
    torch.set_autocast_dtype(NAME, dtype)
