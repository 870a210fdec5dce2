"""Recorded work of an emulated GPU: calls of PyTorch and launches of kernels, done again on the same memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, cast

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

GARBAGE: Final = 1


class Recording(TorchDispatchMode):
    """What is done in this thread while it is entered, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._done: list[tuple[Callable[[], Any], list[Tensor]]] = []
        """Each call, and the tensors that it made, whose memory is written again."""

    def __enter__(self) -> Recording:
        _ENTERED.append(self)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        _ENTERED.remove(self)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_memory(tensor) for tensor in _tensors([*args, *(kwargs or {}).values()])}
        made = [tensor for tensor in _tensors(result) if _memory(tensor) not in given]
        self._done.append((lambda: func(*args, **(kwargs or {})), made))
        return result

    def add(self, launch: Callable[[], Any]) -> None:
        """A kernel, which writes into its operands."""
        self._done.append((launch, []))

    def repeat(self) -> None:
        for call, made in self._done:
            again = _tensors(call())
            for old, new in zip(made, again if made else (), strict=True):
                old.copy_(new)

    def spoil(self) -> None:
        """Overwrite what was made: a GPU computes nothing while it records."""
        for _, made in self._done:
            for tensor in made:
                tensor.fill_(GARBAGE)


_ENTERED: Final = list[Recording]()


def launched(again: Callable[[], Any]) -> None:
    """A kernel has been launched, and `again` does the same once more."""
    for recording in _ENTERED[-1:]:
        recording.add(again)


def _tensors(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    items = cast("Iterable[Any]", found) if isinstance(found, tuple | list) else ()
    return [each for item in items for each in _tensors(item)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
