"""Functions without parameters, such as losses that match boxes to targets: after a graph break they run op by op.

Where a model's call breaks, Dynamo captures each function that is called from there on by itself. One that works on
data alone holds little to plan, most often breaks again, at values that it reads, and has other sizes in each batch:
its many small graphs would take minutes to capture.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Final, cast

from torch import nn

_DEPTH: Final = 3
_MOST: Final = 1000
"""How deep into arguments, and at how many values, is looked: those nearest first."""


def works_on_data_alone(frame: FrameType) -> bool:
    """Whether the call of a function that begins with this frame can reach no parameter, as far as can be seen.

    Its arguments and the globals that it names are looked through, and the attributes of objects among them.
    """
    if frame.f_code.co_name.startswith("<"):  # a comprehension goes through an iterator
        return False
    values = [*frame.f_locals.values(), *_named_models(frame.f_code, frame.f_globals)]
    waiting = deque((value, _DEPTH) for value in values)
    for _ in range(_MOST):
        if not waiting:
            break
        value, depth = waiting.popleft()
        if _is_or_has_parameter(value):
            return False
        if depth and len(waiting) < _MOST:
            waiting.extend((each, depth - 1) for each in islice(_within(value), _MOST))
    return True


def _is_or_has_parameter(value: object) -> bool:
    """Also true of an iterator, which may yield one."""
    if isinstance(value, nn.Module):
        return next(value.parameters(), None) is not None
    return isinstance(value, nn.Parameter | Iterator)


def _named_models(code: CodeType, known: Mapping[str, object]) -> Iterator[nn.Module]:
    """The modules among the globals that a function names."""
    for name in code.co_names:
        if isinstance(value := known.get(name), nn.Module):
            yield value


def _within(value: object) -> Iterator[object]:
    """What a container, a function or an object holds."""
    if isinstance(value, str | bytes | type | ModuleType):
        return
    if isinstance(value, Mapping):
        yield from cast("Mapping[Any, Any]", value).values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from cast("Iterable[Any]", value)
    elif isinstance(value, partial):
        made = cast("partial[Any]", value)
        yield from (made.func, *made.args, *made.keywords.values())
    elif isinstance(value, FunctionType):
        yield from _named_models(value.__code__, value.__globals__)
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # an empty one
                yield cell.cell_contents
    else:
        yield getattr(value, "__self__", None)
        yield from getattr(value, "__dict__", {}).values()
