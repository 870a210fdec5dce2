"""Checkpoints of `torch.distributed.checkpoint` that workers write and read in parallel, each its own part.

The files have the format that torch writes for one device: any program reads them with
`torch.distributed.checkpoint.load`, on any number of workers or none. No tensor is gathered in one process.

    checkpoint.save({"model": model.state_dict()}, "folder")
    checkpoint.load(state, "folder")   # into the tensors of `state`, wherever they are
"""

from __future__ import annotations

import dataclasses
import errno
import os
import secrets
import warnings
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import api, filesystem, metadata, planner
from torch.futures import Future

from moaic.device.handles import is_ours, view_of
from moaic.ir.errors import Diagnostic
from moaic.runtime.controller import session
from moaic.runtime.controller.buffer import Buffer
from moaic.runtime.host.disk import chain
from moaic.runtime.protocol.boxes import Box, FileSource

METADATA: Final = ".metadata"
"""The file that torch writes last."""

StateDict = Mapping[str, Any]

_torch: Final[Any] = dcp
_filesystem: Final[Any] = filesystem
_metadata: Final[Any] = metadata
_planner: Final[Any] = planner
_api: Final[Any] = api


def save(state: StateDict, folder: str | os.PathLike[str]) -> None:
    """Writes a state dict, nested or not, to a folder that all workers can write; it replaces a checkpoint there.

    Raises OSError or WorkerError if that fails; the folder then is as it was.
    """
    writer = Writer(folder)
    try:
        with _without_process_group(), _own_errors(folder):
            _torch.save(dict(state), storage_writer=writer, planner=SavePlanner(), no_dist=True)
    except BaseException:
        writer.discard()
        raise


def load(state: StateDict, folder: str | os.PathLike[str]) -> None:
    """Reads a checkpoint into the tensors of a state dict, in place. Raises FileNotFoundError if there is none."""
    if not (Path(folder) / METADATA).exists():
        raise FileNotFoundError(errno.ENOENT, "No checkpoint", os.fspath(folder))
    with _without_process_group(), _own_errors(folder):
        _torch.load(dict(state), storage_reader=Reader(folder), no_dist=True)


@contextmanager
def _without_process_group() -> Generator[None]:
    """Silences torch's warnings that torch.distributed is not initialized, and that a checkpoint is replaced."""
    with warnings.catch_warnings():
        for message in ("torch.distributed is disabled", "Detected an existing checkpoint"):
            warnings.filterwarnings("ignore", message=message)
        yield


@contextmanager
def _own_errors(folder: str | os.PathLike[str]) -> Generator[None]:
    """Raises what went wrong instead of torch's exception about it, which `except Exception` does not catch."""
    try:
        yield
    except _api.CheckpointException as error:
        (failure, _), *_ = error.failures.values()
        # torch.save fails once more after a disk that is full.
        cause = next((each for each in chain(failure) if isinstance(each, OSError)), failure)
        if isinstance(cause, OSError) and cause.filename is None and cause.errno is not None:
            cause.filename = os.fspath(folder)
        raise cause.with_traceback(None) from None


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """A box of a buffer, and the rank of the worker that writes it."""

    buffer: Buffer
    box: Box
    rank: int


class SavePlanner(_torch.DefaultSavePlanner):
    """Assigns each part of a tensor to a worker that holds it; of replicas, to the one with the fewest bytes so far."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.written: dict[Any, Written] = {}
        """Boxes by the index of their write item."""

    def create_local_plan(self) -> Any:
        plan: Any = _torch.DefaultSavePlanner.create_local_plan(self)
        loads = [0] * session.accelerator().flavor if session.SESSION.is_running() else []
        items = [new for item in plan.items for new in self._in_parts(item, loads)]
        self.plan: Any = dataclasses.replace(plan, items=items)
        return self.plan

    def _in_parts(self, item: Any, loads: list[int]) -> Iterable[Any]:
        """One item for each box of the tensor's parts; the item itself if workers hold no part of it."""
        buffer = None if item.type != _planner.WriteItemType.TENSOR else _whole_buffer(self.lookup_object(item.index))
        parts = () if buffer is None else session.accelerator().parts(buffer)
        if buffer is None or not parts:
            yield item
            return
        for part in parts:
            rank = min(part.ranks, key=lambda rank: loads[rank])
            for box in part.boxes:
                new = _of_box(item, box)
                loads[rank] += item.tensor_data.properties.dtype.itemsize * torch.Size(box.sizes).numel()
                self.written[new.index] = Written(buffer, box, rank)
                yield new


def _of_box(item: Any, box: Box) -> Any:
    starts, sizes = torch.Size(box.starts), torch.Size(box.sizes)
    return dataclasses.replace(
        item,
        index=_metadata.MetadataIndex(item.index.fqn, starts),
        type=_planner.WriteItemType.SHARD,
        tensor_data=dataclasses.replace(
            item.tensor_data, chunk=_metadata.ChunkStorageMetadata(offsets=starts, sizes=sizes)
        ),
    )


def _whole_buffer(tensor: Any) -> Buffer | None:
    """The buffer of a device tensor that covers all of it; None for any other value."""
    if not isinstance(tensor, Tensor) or not is_ours(tensor):
        return None
    view = view_of(tensor)
    return view.buffer if view.is_whole else None


class Writer(_torch.FileSystemWriter):
    """Writes the items of a `SavePlanner`; this process writes those that no worker holds.

    Files have names of their own, so that an earlier checkpoint is whole until this one is.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__(folder)
        self._folder = Path(folder).absolute()
        self._prefix = f"__{secrets.token_hex(4)}_"
        self._replaced = [*self._folder.glob("__*.distcp")]

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        prefix = _filesystem._StoragePrefix(f"{self._prefix}0_")
        return [dataclasses.replace(plan, storage_data=prefix) for plan in plans]

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(metadata, results)
        for path in self._replaced:
            path.unlink(missing_ok=True)

    def discard(self) -> None:
        """Removes what was written of a checkpoint that is not whole."""
        for path in self._folder.glob(f"{self._prefix}*"):
            path.unlink(missing_ok=True)

    def write_data(self, plan: Any, planner: Any) -> Any:
        by_workers = [item for item in plan.items if item.index in planner.written]
        rest = dataclasses.replace(plan, items=[item for item in plan.items if item.index not in planner.written])
        done: list[Any] = self._by_workers(by_workers, planner.written) if by_workers else []
        if rest.items:
            done += _torch.FileSystemWriter.write_data(self, rest, planner).wait()
        future: Future[list[Any]] = Future()
        future.set_result(done)
        return future

    def _by_workers(self, items: Iterable[Any], written: Mapping[Any, Written]) -> list[Any]:
        accelerator = session.accelerator()
        rows: list[list[Any]] = [[] for _ in range(accelerator.flavor)]
        for item in items:
            rows[written[item.index].rank].append(item)
        names = [f"{self._prefix}worker{rank}.distcp" for rank in range(len(rows))]
        found = accelerator.store(
            [str(self._folder / name) for name in names],
            [[(written[item.index].buffer, written[item.index].box) for item in row] for row in rows],
        )
        for rank, places in found.items():
            _check_shared(self._folder / names[rank], accelerator.hosts[rank], places)
        return [
            _filesystem.WriteResult(item.index, length, _filesystem._StorageInfo(names[rank], offset, length))
            for rank, places in found.items()
            for item, (offset, length) in zip(rows[rank], places, strict=True)
        ]


def _check_shared(path: Path, host: str, places: list[tuple[int, int]]) -> None:
    """Raises Diagnostic for a file that a worker of another host has written where this host does not see it."""
    size = max((offset + length for offset, length in places), default=0)
    if host and not (path.exists() and path.stat().st_size >= size):
        raise Diagnostic(
            f"host `{host}` has written {path.name} to a folder of its own, {path.parent}",
            hint="checkpoints of workers on several hosts need a folder that all hosts see",
        )


class Reader(_torch.FileSystemReader):
    """Reads a checkpoint of any layout; each worker reads the parts of device tensors that it holds."""

    def read_data(self, plan: Any, planner: Any) -> Any:
        sources: dict[Buffer, list[FileSource]] = {}
        rest: list[Any] = []
        for item in plan.items:
            buffer = self._buffer(item, planner)
            if buffer is None:
                rest.append(item)
            else:
                sources.setdefault(buffer, []).append(self._source(item))
        accelerator = session.accelerator() if sources else None
        for buffer, given in sources.items():
            cast("Any", accelerator).restore(buffer, given)
        future = _torch.FileSystemReader.read_data(self, dataclasses.replace(plan, items=rest), planner)
        if accelerator is not None:
            # The caller may delete the files after this returns.
            accelerator.synchronize()
        return future

    def _buffer(self, item: Any, planner: Any) -> Buffer | None:
        if item.type != _planner.LoadItemType.TENSOR or self.storage_data[item.storage_index].transform_descriptors:
            return None
        return _whole_buffer(planner.lookup_tensor(item.dest_index))

    def _source(self, item: Any) -> FileSource:
        stored = self.storage_data[item.storage_index]
        path = Path(self.path).absolute() / stored.relative_path
        inside, starts, sizes = (tuple(each) for each in (item.storage_offsets, item.dest_offsets, item.lengths))
        return FileSource(str(path), stored.offset, stored.length, inside, starts, sizes)
