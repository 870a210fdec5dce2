"""Models with few of their equal layers, so that a step is captured as fast as that of a shallow model.

Layers are equal where they are modules of the same classes with the same attributes and parameters, or sequences of
such modules with a common period. The lowest and the highest units stay: where a module computes something else above
some number of a layer, these differ. What a loop over the layers makes of such a number is not seen.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Final, TypeAlias, cast

import torch
from torch import Tensor, nn

from moaic.passes.transforms.outline import layer_of
from moaic.passes.transforms.shallow import Stack, longest_stack

LONG: Final = 8
"""Units of a stack of which few are left: of fewer, all are captured as soon."""

HIGHEST: Final = 2
"""Units that are left at the upper end of a stack; all others that are left are at the lower."""

PLAIN: Final = (bool, int, float, str, type(None), torch.dtype, torch.device, FunctionType, BuiltinFunctionType)
"""Types of attributes that are compared by value; others are by what they contain, or by their class."""

_Container: TypeAlias = nn.ModuleList | nn.Sequential


@dataclass(frozen=True, slots=True)
class Cut:
    """So many layers left out of the container at this module path."""

    container: str
    layers: int


@contextmanager
def shortened(model: nn.Module, units: int) -> Generator[Sequence[Cut]]:
    """Inside, long stacks of equal layers of `model` have so many units; yields what is left out."""
    assert HIGHEST < units < LONG
    cuts: list[Cut] = []
    with ExitStack() as whole:
        for path, container in [*_containers(model)]:
            layers = [*container]
            kinds = _kinds(layers)
            stack = longest_stack(path, dict(enumerate(kinds)))
            if stack.units < LONG or not _goes_on(stack, kinds) or _share_parameters(layers):
                continue
            start = stack.first + (units - HIGHEST) * stack.period
            out = range(start, start + (stack.units - units) * stack.period)
            whole.enter_context(_without(container, out))
            cuts.append(Cut(path, len(out)))
        yield cuts


def _goes_on(stack: Stack, kinds: Sequence[Hashable]) -> bool:
    """Whether the layers behind a stack begin another unit: loops that take settings by number find those of others."""
    return all(kinds[at] == kinds[at - stack.period] for at in range(stack.first + stack.period, len(kinds)))


def _share_parameters(layers: Sequence[nn.Module]) -> bool:
    owned = [{id(parameter) for parameter in layer.parameters()} for layer in layers]
    return sum(map(len, owned)) > len(set[int]().union(*owned))


def _containers(model: nn.Module) -> Iterator[tuple[str, _Container]]:
    """The containers of layers that are in no layer themselves, and whose modules are numbered."""
    for path, module in _modules_in(model):
        if isinstance(module, _Container) and layer_of(f"{path}.0") == (path, 0):
            names = [name for name, _ in module.named_children()]
            if names and names == [str(number) for number in range(len(module))]:
                yield path, module


@contextmanager
def _without(container: _Container, out: range) -> Generator[None]:
    """Inside, the container lacks these of its modules, and the numbers of those behind them are less."""
    removed = [container[number] for number in out]
    del container[out.start : out.stop]
    try:
        yield
    finally:
        for number, layer in zip(out, removed, strict=True):
            container.insert(number, layer)


def _kinds(layers: Sequence[nn.Module]) -> list[Hashable]:
    """By layer, what equal ones have in common: all of their attributes but those that count the layers."""
    described = [_description(layer) for layer in layers]
    counting = {
        name
        for name, start in described[0].items()
        if type(start) is int and all(each.get(name) == start + at for at, each in enumerate(described))
    }
    return [frozenset((name, value) for name, value in each.items() if name not in counting) for each in described]


def _description(layer: nn.Module) -> Mapping[str, Hashable]:
    """The attributes, parameters and buffers of a layer and of the modules in it, by path."""
    found: dict[str, Hashable] = {}
    for path, module in _modules_in(layer):
        found[path] = type(module)
        found.update((f"{path}.{name}", _comparable(value)) for name, value in vars(module).items())
    tensors = cast("Iterable[tuple[str, Tensor]]", (*layer.named_parameters(), *layer.named_buffers()))
    found.update((name, (tensor.shape, tensor.dtype, tensor.requires_grad)) for name, tensor in tensors)
    return found


def _modules_in(module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """A module and all modules in it, by path; torch's annotations do not say so."""
    return cast("Iterable[tuple[str, nn.Module]]", module.named_modules())


def _comparable(value: object) -> Hashable:
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, tuple | list):
        return tuple(map(_comparable, cast("Sequence[object]", value)))
    if isinstance(value, set):
        return frozenset(map(_comparable, cast("set[object]", value)))
    if isinstance(value, dict):
        return tuple((key, _comparable(each)) for key, each in cast("dict[Hashable, object]", value).items())
    return type(value)
