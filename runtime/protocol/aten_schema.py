"""How an op of the IR corresponds to the arguments of an aten overload: operands are tensors, attributes the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Final

import torch
from torch._ops import OpOverload

from moaic.ir.graph import Attr
from moaic.runtime.dtypes import DTYPES

LIBRARIES: Final[Mapping[str, str]] = {"torch_nn": "torch.nn.modules.linear_cross_entropy"}
"""Namespaces of PyTorch's ops that `import torch` does not register, and the modules that do."""

NAMESPACES: Final = frozenset({"aten", "prims", "moai", *LIBRARIES})
"""Those that workers know; they do not import what registers the others."""

PLACEMENT: Final = frozenset({"device", "layout", "memory_format", "pin_memory"})
"""Arguments that say where and how a tensor is stored: the IR leaves them out."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of an overload; `kind` is tensor, tensors, dtype, placement or literal."""

    name: str
    kind: str
    keyword: bool
    required: bool
    default: Any


@dataclass(frozen=True, slots=True)
class Signature:
    """An overload and its arguments; `nullary` when it reads no tensor and so must be told its device."""

    overload: OpOverload[..., Any]
    arguments: tuple[Argument, ...]
    nullary: bool

    @property
    def operands(self) -> tuple[Argument, ...]:
        return tuple(argument for argument in self.arguments if argument.kind in ("tensor", "tensors"))

    @property
    def takes_device(self) -> bool:
        return any(argument.kind == "placement" and argument.name == "device" for argument in self.arguments)


def op_name(overload: OpOverload[..., Any]) -> str:
    """`aten.mm` for a default overload, else `aten.sum.dim_IntList`."""
    return str(overload).removesuffix(".default")


@cache
def signature(name: str) -> Signature:
    """The signature of the op called `name`; an unknown op raises LookupError."""
    namespace, packet, *rest = name.split(".")
    if namespace in LIBRARIES:
        import_module(LIBRARIES[namespace])
    try:
        overload = getattr(getattr(getattr(torch.ops, namespace), packet), rest[0] if rest else "default")
    except AttributeError:
        raise LookupError(f"no op is called {name}") from None
    return signature_of(overload)


@cache
def written(op: str) -> frozenset[int | str]:
    """Positions and names of the arguments that an op writes."""
    schema = signature(op).overload._schema.arguments  # pyright: ignore[reportPrivateUsage]
    aliases = [(position, each.name, each.alias_info) for position, each in enumerate(schema)]
    pairs = [(position, name) for position, name, alias in aliases if alias is not None and alias.is_write]
    return frozenset(key for pair in pairs for key in pair)


@cache
def signature_of(overload: OpOverload[..., Any]) -> Signature:
    arguments = tuple(_argument(argument) for argument in overload._schema.arguments)  # pyright: ignore[reportPrivateUsage]
    nullary = not any(argument.kind in ("tensor", "tensors") for argument in arguments)
    return Signature(overload, arguments, nullary)


def _argument(argument: Any) -> Argument:
    return Argument(
        name=argument.name,
        kind=_kind(argument),
        keyword=argument.kwarg_only,
        required=not argument.has_default_value(),
        default=argument.default_value,
    )


def _kind(argument: Any) -> str:
    kind = str(argument.real_type).removeprefix("Optional[").removesuffix("]")
    if argument.name in PLACEMENT:
        return "placement"
    if "Tensor" in kind:
        return "tensors" if "List" in kind else "tensor"
    return "dtype" if kind == "ScalarType" else "literal"


def call_arguments(
    called: Signature, operands: Iterable[Any], attrs: Mapping[str, Attr], device: torch.device
) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments with which to call an overload on `operands`, tensors or proxies."""
    rest = iter(operands)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in called.arguments:
        value = _value(argument, rest, attrs, device if called.nullary else None)
        if argument.keyword:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def _value(argument: Argument, operands: Any, attrs: Mapping[str, Attr], device: torch.device | None) -> Any:
    if argument.kind == "placement":
        return device if argument.name == "device" and device is not None else argument.default
    if argument.kind in ("tensor", "tensors"):
        operand = next(operands, None)
        if operand is None:
            return attrs.get(argument.name, argument.default)
        return list(operand) if argument.kind == "tensors" else operand
    value = attrs.get(argument.name, argument.default)
    return DTYPES[value] if argument.kind == "dtype" and isinstance(value, str) else value
