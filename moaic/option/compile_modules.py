"""Modules that lie on the accelerator are compiled when they are first called.

PyTorch runs a module's `_compiled_call_impl` if it has one. The mode makes it a descriptor of the class, which stores a
compiled call on a module when that is called as a whole model. A module keeps its class, keys and hooks, and its copies
and pickles are plain, as PyTorch leaves the compiled call out of them.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import count
from types import FrameType
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from moaic.device import torch_private
from moaic.device.torch_private import NAME
from moaic.option.data_functions import works_on_data_alone
from moaic.options import Choices

LOGGER: Final = logging.getLogger("moaic")


class _Root(threading.local):
    """Of this thread."""

    entered = False
    """Whether it is inside a compiled module, whose submodules are not compiled by themselves."""
    refusal = ""
    """Why Dynamo could not trace a part of the compiled module's call; that part has run op by op, in its place."""


_ROOT: Final = _Root()

WRAPPERS: Final[tuple[type[nn.Module], ...]] = (nn.DataParallel, nn.parallel.DistributedDataParallel)
"""Modules that run a model on several devices."""

PLAIN: Final = frozenset({Tensor, nn.Parameter})
"""The classes of tensors that are compiled as arguments."""

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]

MOST_OPS: Final = 1000
"""Ops before a call that are looked at for what it depends on: a cell in a loop has those of all steps before it."""


@contextmanager
def left_alone() -> Generator[None]:
    """For the time of the block, modules are not compiled in this thread."""
    before, _ROOT.entered = _ROOT.entered, True
    try:
        yield
    finally:
        _ROOT.entered = before


def recomputes_alike(position: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Wraps a function of PyTorch that is given, at this position, what is called once more in the backward.

    What is called inside a compiled module is not compiled by itself: then it must not be in the backward either.
    """

    def make(real: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            if _ROOT.entered:
                args = (*args[:position], _not_compiled(args[position]), *args[position + 1 :])
            return real(*args, **kwargs)

        return call

    return make


def _not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with left_alone():
            return function(*args, **kwargs)

    return call


class AutoCompile:
    """The descriptor. It has no `__set__`, so that a module which the user compiled keeps its own call."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self._modules: WeakSet[nn.Module] = WeakSet()
        self._compilers: dict[Hashable, Compiler] = {}
        """By what models have in common that share their compiled calls."""

    def __get__(self, module: nn.Module | None, owner: object = None) -> CompiledCall | None:
        if module is None or torch.compiler.is_compiling() or _ROOT.entered or not _is_whole_model(module):
            return None
        call = CompiledCall(module, self._compiler(module))
        vars(module)[torch_private.CALL_COMPILED.name] = call
        self._modules.add(module)
        return call

    def _compiler(self, module: nn.Module) -> Compiler:
        """One for all models that are alike, such as the members of an ensemble."""
        params = tuple((name, param.shape, param.dtype) for name, param in module.named_parameters())
        key = type(module), params
        if key not in self._compilers:
            self._compilers[key] = torch_private.compiler(NAME, self._choices.backend, works_on_data_alone, _note)
        return self._compilers[key]

    def release(self) -> None:
        """Removes the compiled call from every module."""
        for module in self._modules:
            vars(module).pop(torch_private.CALL_COMPILED.name, None)


class CompiledCall:
    """The call of a module: compiled while the module is on the accelerator, plain otherwise."""

    def __init__(self, module: nn.Module, compiler: Compiler) -> None:
        self._module = module
        self._compiled = compiler(_top_frame(module))
        self._is_plain = False
        """Whether Dynamo could not trace a call that runs: the next ones are plain."""
        self._has_told = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _ROOT.entered or not is_on_accelerator(self._module):
            return torch_private.call_of(self._module)(*args, **kwargs)
        with left_alone():
            frame = inspect.currentframe()
            if self._is_plain or self._is_called_plainly(torch_private.values_in((args, kwargs)), frame):
                return torch_private.call_of(self._module)(*args, **kwargs)
            _ROOT.refusal = ""
            result = self._compiled(*args, **kwargs)
        # A call that an op ends by an error, refusing its operands, says nothing of the next ones.
        if _ROOT.refusal:
            self._is_plain = True
            name = type(self._module).__name__
            LOGGER.warning("%s runs op by op from now on, without a plan: %s", name, _ROOT.refusal)
        return result

    def _is_called_plainly(self, values: Sequence[object], frame: FrameType | None) -> bool:
        """Whether the call in this frame, with these values among its arguments, runs op by op.

        It does for tensors of other classes, such as nested ones: a plan knows plain tensors. Under hooks on saved
        tensors: nothing of a compiled step is saved that they could pack. Under hooks of all modules, which Dynamo does
        not call for PyTorch's own. And where a gradient is wanted of an input, as in gradient penalties and
        differential equations, or of parameters that the call is given, as in MAML: it is most often differentiated
        again, which no compiled graph can be.
        """
        others = [type(value).__name__ for value in values if isinstance(value, Tensor) and type(value) not in PLAIN]
        if others:
            self._tell(f"for tensors of class {others[0]}: plans know plain tensors")
        elif torch_private.has_hooks_on_saved_tensors():
            self._tell("under hooks on saved tensors, which get what each op saves")
        elif torch_private.has_hooks_of_all_modules():
            self._tell("under hooks of all modules")
        elif torch.is_grad_enabled() and wants_gradient_of_inputs(values):
            self._tell("where the gradient of an input is wanted: it may be differentiated again")
        elif torch.is_grad_enabled() and torch_private.is_functional_call(frame) and self._wants_gradients():
            self._tell("where it is called with parameters from elsewhere: their gradients may be differentiated again")
        else:
            return torch_private.is_traced_by_fx()
        return True

    def _wants_gradients(self) -> bool:
        return any(param.requires_grad for param in self._module.parameters())

    def _tell(self, when: str) -> None:
        if not self._has_told:
            self._has_told = True
            LOGGER.info("%s runs op by op %s", type(self._module).__name__, when)


def _note(refusal: Exception) -> None:
    _ROOT.refusal = str(refusal).partition("\n")[0]


def wants_gradient_of_inputs(values: Iterable[object]) -> bool:
    """Whether tensors among these are made in few ops from one that requires a gradient and is no parameter."""
    tensors = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
    if any(tensor.is_leaf and not isinstance(tensor, nn.Parameter) for tensor in tensors):
        return True
    found: dict[Any, None] = dict.fromkeys(tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None)
    waiting = deque(found)
    while waiting and len(found) < MOST_OPS:
        node = waiting.popleft()
        leaf = getattr(node, "variable", None)
        if leaf is not None and not isinstance(leaf, nn.Parameter):
            return True
        new = [each for each, _ in node.next_functions if each is not None and each not in found]
        found.update(dict.fromkeys(new))
        waiting += new
    return False


def _top_frame(module: nn.Module) -> Callable[..., Any]:
    """The function that Dynamo captures: the module's call if Dynamo traces that, else a frame around it."""
    plain = torch_private.call_of(module)
    if torch_private.is_seen_by_dynamo(module):
        return plain

    def call(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)

    # The query for a model's device expects a bound method.
    vars(call)["__self__"] = module
    # Dynamo stores dynamic sizes by the name of the code object, so each module needs its own name.
    call.__code__ = call.__code__.replace(co_name=f"{type(module).__name__}_{next(_numbers)}")
    return call


_numbers: Final = count()


def is_on_accelerator(module: nn.Module) -> bool:
    """Whether the module's first parameter is on the accelerator; False for a module without parameters."""
    return any(parameter.device.type == NAME for parameter in _first(module))


def _first(module: nn.Module) -> list[nn.Parameter]:
    for parameter in module.parameters():
        return [parameter]
    return []


def _is_whole_model(module: nn.Module) -> bool:
    """Whether the call is a whole model's: those that pass their inputs on to one, or find shapes, are none."""
    plain = not issubclass(type(module), WRAPPERS) and not torch_private.is_module_of_a_compiler(module)
    return plain and is_on_accelerator(module) and not any(is_lazy(param) for param in module.parameters())
