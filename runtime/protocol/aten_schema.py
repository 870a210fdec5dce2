"""The one reader of aten schemas: a cached description of each overload, and the call of an overload by an IR op."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property
from importlib import import_module
from typing import Any, Final

import torch
from torch._ops import OpOverload

from moaic.ir.graph import Attr
from moaic.runtime.dtypes import DTYPES

LIBRARIES: Final[Mapping[str, str]] = {"torch_nn": "torch.nn.modules.linear_cross_entropy"}
"""Namespaces of PyTorch's ops that `import torch` does not register, and the modules that do."""

NAMESPACES: Final = frozenset({"aten", "prims", "moai", *LIBRARIES})
"""Namespaces of ops that exist on workers, which do not import the modules that register others."""

PLACEMENT: Final = frozenset({"device", "layout", "pin_memory"})
"""Arguments that choose the storage of a new tensor; no shape or stride depends on them."""


RESULT_MASKS: Final = frozenset({"output_mask", "grad_input_mask"})
"""Arguments of backward ops that say, by result, whether it is asked for."""


class ArgKind(Enum):
    """The kind of an argument: it decides how the IR, the message to the workers and the key of a call spell it."""

    TENSOR = "tensor"
    TENSORS = "tensors"
    NUMBER = "number"
    """A scalar on whose value no shape depends. Scalars of ops without tensors are LITERAL: the end of `arange`."""
    NUMBERS = "numbers"
    """A list of such scalars: one per position of lists of tensors."""
    DTYPE = "dtype"
    MEMORY_FORMAT = "memory_format"
    """Decides the strides of the results; the IR leaves it out, as its tensors have no strides."""
    PLACEMENT = "placement"
    """One of PLACEMENT; the IR and the message to the workers leave it out."""
    LITERAL = "literal"
    """Sizes, dims, flags and all the rest."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of an overload."""

    name: str
    kind: ArgKind
    keyword: bool
    required: bool
    default: Any
    is_written: bool
    is_out: bool
    """Whether it is an `out=` tensor, which may be resized to the result."""

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor or a list of them: an operand in the IR."""
        return self.kind in (ArgKind.TENSOR, ArgKind.TENSORS)

    @property
    def is_attribute(self) -> bool:
        """Whether it is an attribute in the IR."""
        return not self.is_tensor and self.kind not in (ArgKind.PLACEMENT, ArgKind.MEMORY_FORMAT)


@dataclass(frozen=True)
class Signature:
    """One overload: its arguments, keyword-only ones too, in order, and its results."""

    overload: OpOverload[..., Any]
    name: str
    """The op's name in the IR, such as `aten.add.Tensor`."""
    arguments: tuple[Argument, ...]
    returns: tuple[int | None, ...]
    """For each result the position of the argument that it is; None for a new one."""
    gives_tensors: bool
    """Whether all results are tensors or lists of them."""
    nullary: bool
    """Whether it reads no tensor, and so must be told its device."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(argument.name for argument in self.arguments)

    @cached_property
    def kinds(self) -> tuple[ArgKind, ...]:
        return tuple(argument.kind for argument in self.arguments)

    @cached_property
    def by_name(self) -> Mapping[str, ArgKind]:
        return dict(zip(self.names, self.kinds, strict=True))

    @cached_property
    def operands(self) -> tuple[Argument, ...]:
        return tuple(argument for argument in self.arguments if argument.is_tensor)

    @cached_property
    def written(self) -> tuple[int, ...]:
        """Positions of the arguments that the op writes."""
        return tuple(position for position, argument in enumerate(self.arguments) if argument.is_written)

    @cached_property
    def written_keys(self) -> frozenset[int | str]:
        """Positions and names of the arguments that the op writes."""
        return frozenset((*self.written, *(self.names[position] for position in self.written)))

    @cached_property
    def tags(self) -> frozenset[str]:
        return frozenset(tag.name for tag in self.overload.tags)

    @property
    def packet(self) -> str:
        """The op's name without namespace and overload: `add` of `aten.add.Tensor`."""
        return self.name.split(".")[1]

    @property
    def has_lists(self) -> bool:
        return ArgKind.TENSORS in self.kinds

    @property
    def takes_device(self) -> bool:
        return "device" in self.names

    @property
    def is_random(self) -> bool:
        """Whether the op may draw random numbers."""
        return "nondeterministic_seeded" in self.tags or "generator" in self.names

    @cached_property
    def mask(self) -> int | None:
        """The position of the argument that says which new results are asked for."""
        if not self.returns or any(source is not None for source in self.returns):
            return None
        return next((i for i, name in enumerate(self.names) if name in RESULT_MASKS), None)

    def asked_for(self, results: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The results of a call, with None for those that it does not ask for: some kernels make these all the same."""
        if self.mask is None:
            return results
        mask = self.argument(self.mask, args, kwargs)
        return tuple(result if wanted else None for result, wanted in zip(results, mask, strict=True))

    def argument(self, position: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The argument at `position` of a call; None when the call leaves it out."""
        return args[position] if position < len(args) else kwargs.get(self.names[position])


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
def signature_of(overload: OpOverload[..., Any]) -> Signature:
    schema: Any = overload._schema  # pyright: ignore[reportPrivateUsage]
    arguments: list[Any] = list(schema.arguments)
    nullary = not any(_kind(argument, nullary=False) in (ArgKind.TENSOR, ArgKind.TENSORS) for argument in arguments)
    return Signature(
        overload=overload,
        name=op_name(overload),
        arguments=tuple(_argument(argument, nullary=nullary) for argument in arguments),
        returns=tuple(_source(result, arguments) for result in schema.returns),
        gives_tensors=all("Tensor" in str(result.type) for result in schema.returns),
        nullary=nullary,
    )


def _argument(argument: Any, *, nullary: bool) -> Argument:
    return Argument(
        name=argument.name,
        kind=_kind(argument, nullary=nullary),
        keyword=argument.kwarg_only,
        required=not argument.has_default_value(),
        default=argument.default_value,
        is_written=_is_written(argument),
        is_out=bool(argument.is_out),
    )


def _kind(argument: Any, *, nullary: bool) -> ArgKind:
    # `type` calls dtypes, layouts and memory formats integers, `real_type` does not.
    type_ = str(argument.real_type).removeprefix("Optional[").removesuffix("]")
    if argument.name in PLACEMENT:
        return ArgKind.PLACEMENT
    if "Tensor" in type_:
        return ArgKind.TENSORS if "List" in type_ else ArgKind.TENSOR
    if type_ in ("number", "float", "List[number") and not nullary:
        return ArgKind.NUMBERS if "List" in type_ else ArgKind.NUMBER
    return {"ScalarType": ArgKind.DTYPE, "MemoryFormat": ArgKind.MEMORY_FORMAT}.get(type_, ArgKind.LITERAL)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _source(result: Any, arguments: list[Any]) -> int | None:
    """The position of the written argument that a result is."""
    if result.alias_info is None or not result.alias_info.is_write:
        return None
    names = result.alias_info.before_set
    return next(i for i, each in enumerate(arguments) if _is_written(each) and each.alias_info.before_set == names)


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
    if argument.is_tensor:
        operand = next(operands, None)
        if operand is None:
            return attrs.get(argument.name, argument.default)
        return list(operand) if argument.kind is ArgKind.TENSORS else operand
    if not argument.is_attribute:
        return device if argument.name == "device" and device is not None else argument.default
    value = attrs.get(argument.name, argument.default)
    return DTYPES[value] if argument.kind is ArgKind.DTYPE and isinstance(value, str) else value
