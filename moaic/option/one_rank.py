"""Process groups of one rank: what a script that is written for torchrun has when it is started once.

One process drives all devices, so `DistributedDataParallel` has nothing to exchange, and every collective gives each
rank, the only one, its own value.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any, Final

import torch
from torch import Tensor, distributed

from moaic.device.torch_private import NAME
from moaic.ir.errors import Diagnostic

Tensors = Sequence[Tensor]


class Done(distributed.Work):
    """A collective that is complete, with its result."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(result)

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future


_ProcessGroup: Final[Any] = distributed.ProcessGroup


class OneRank(_ProcessGroup):
    """The collectives of one rank. PyTorch calls these methods by name; some have another one before 2.13."""

    def __init__(self, name: str = "") -> None:
        super().__init__(0, 1)
        self._name = name

    @property
    def group_name(self) -> str:
        """The name by which PyTorch finds the group, which it sets for groups of its own alone."""
        return self._name

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Done:
        return Done(tensors)

    allreduce_coalesced = reduce = broadcast = allreduce

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Done:
        for (output,), value in zip(outputs, inputs, strict=True):
            output.copy_(value)
        return Done(outputs)

    gather = allgather

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Done:
        for output, (value,) in zip(outputs, inputs, strict=True):
            output.copy_(value)
        return Done(outputs)

    scatter = reduce_scatter

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Done:
        for output, value in zip(outputs, inputs, strict=True):
            output.copy_(value)
        return Done(outputs)

    allgather_into_tensor_coalesced = reduce_scatter_tensor_coalesced = alltoall

    def _allgather_base(self, output: Tensor, value: Tensor, opts: Any = None) -> Done:
        output.copy_(value.view_as(output))
        return Done([output])

    all_gather_single = reduce_scatter_single = _reduce_scatter_base = _allgather_base

    def alltoall_base(self, output: Tensor, value: Tensor, *sizes_and_options: Any, **more: Any) -> Done:
        output.copy_(value.view_as(output))
        return Done([output])

    all_to_all_single = alltoall_base

    def barrier(self, opts: Any = None) -> Done:
        return Done(None)


@cache
def register() -> None:
    def create(options: Any, *more: object) -> OneRank:
        return OneRank(options.group_id)

    distributed.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", NAME])


def init_process_group(real: Callable[..., None]) -> Callable[..., None]:
    """Wraps `torch.distributed.init_process_group`: whatever its backend, the group has one rank."""

    @wraps(real)
    def init(backend: str | None = None, init_method: str | None = None, *args: Any, **kwargs: Any) -> None:
        asked = kwargs.get("world_size", -1)
        size = int(os.environ.get("WORLD_SIZE", "1")) if asked < 0 else asked
        if size != 1:
            raise Diagnostic(
                f"this process is one of {size}, and each would drive all devices of the accelerator",
                hint="start the script once, by `python` and not by a launcher: it runs on every device",
            )
        register()
        usual: dict[str, str] = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        for name, value in usual.items():
            os.environ.setdefault(name, value)
        real(NAME, init_method, *args, **kwargs)

    return init
