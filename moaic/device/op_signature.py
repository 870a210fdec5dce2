"""What the kernels must know of an aten overload: where its tensors are, what it writes, what it gives back."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

from moaic.device import torch_private
from moaic.runtime.protocol.aten_schema import op_name


class ArgKind(IntEnum):
    """How an argument enters the message to the workers and the key of the geometry cache."""

    TENSOR = 0
    TENSORS = 1
    VALUE = 2
    """Sizes, dims, dtypes, flags: part of the key."""
    NUMBER = 3
    """A scalar whose value no geometry depends on: only its type is part of the key."""
    PLACE = 4
    """Device, layout, pinning: not sent."""


@dataclass(frozen=True)
class OpSignature:
    """One overload. `kinds` follow the arguments in order, keyword-only ones too."""

    overload: Any
    name: str
    """The op's name in the IR, such as `aten.add.Tensor`."""
    names: tuple[str, ...]
    kinds: tuple[ArgKind, ...]
    written: tuple[int, ...]
    """Positions of the arguments that the op writes."""
    returns: tuple[int | None, ...]
    """For each result the position of the argument that it is, None for a fresh one."""
    gives_tensors: bool
    """Whether all results are tensors or lists of them."""

    @cached_property
    def by_name(self) -> dict[str, ArgKind]:
        return dict(zip(self.names, self.kinds, strict=True))

    @cached_property
    def has_lists(self) -> bool:
        return ArgKind.TENSORS in self.kinds

    @cached_property
    def tags(self) -> frozenset[str]:
        return frozenset(tag.name for tag in self.overload.tags)

    def argument(self, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The argument at `position` of a call; None when the call leaves it out."""
        return args[position] if position < len(args) else kwargs.get(self.names[position])


def signature_of(overload: Any) -> OpSignature:
    schema = torch_private.schema_of(overload)
    arguments: list[Any] = list(schema.arguments)
    results: list[Any] = list(schema.returns)
    creates = not any("Tensor" in str(argument.type) for argument in arguments)
    written = [i for i, argument in enumerate(arguments) if _writes(argument)]
    return OpSignature(
        overload=overload,
        name=op_name(overload),
        names=tuple(argument.name for argument in arguments),
        kinds=tuple(_kind(argument, creates) for argument in arguments),
        written=tuple(written),
        returns=tuple(_source(result, arguments, written) for result in results),
        gives_tensors=all("Tensor" in str(result.type) for result in results),
    )


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _source(result: Any, arguments: list[Any], written: list[int]) -> int | None:
    if result.alias_info is None or not result.alias_info.is_write:
        return None
    names = result.alias_info.before_set
    return next(i for i in written if arguments[i].alias_info.before_set == names)


def _kind(argument: Any, creates: bool) -> ArgKind:
    kind = str(argument.type)
    if "Tensor" in kind:
        return ArgKind.TENSORS if "List" in kind else ArgKind.TENSOR
    if argument.name in ("device", "layout", "pin_memory"):
        return ArgKind.PLACE
    if not creates and kind.removeprefix("Optional[").removesuffix("]") in ("number", "float"):
        return ArgKind.NUMBER
    return ArgKind.VALUE
