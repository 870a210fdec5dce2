"""An accelerator inside this process: every command runs at once, on the host, with the requested geometry.

It is stricter than the real one: a result raises an error if it differs from the shape or type that the device
predicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, cast

import torch

from moaic.runtime.controller.buffer import Buffer, View, storage_geometry
from moaic.runtime.controller.eager_call import EagerCall, OperandForm, take_apart
from moaic.runtime.dtypes import DTYPES
from moaic.runtime.protocol.aten_schema import signature
from moaic.runtime.protocol.operation import ArgSpec, read_as
from moaic.runtime.protocol.statistics import Statistics, WorkerStatistics


class Engine:
    """The part of `Accelerator` that the device uses."""

    def __init__(self) -> None:
        self.numbers = count()
        self.memory: dict[int, torch.Tensor] = {}
        self.launched: list[str] = []

    def buffer(self, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> Buffer:
        return Buffer(next(self.numbers), storage_geometry(dtype, tuple(shape), tuple(strides)))

    def upload(self, buffer: Buffer, tensor: torch.Tensor) -> None:
        assert tensor.device.type == "cpu"
        assert tensor.shape == buffer.shape
        assert tensor.dtype == DTYPES[buffer.dtype]
        self._tensor(buffer).copy_(tensor)

    def fill(self, buffer: Buffer, value: Any) -> None:
        self._tensor(buffer).fill_(value)

    def download(self, view: View) -> torch.Tensor:
        return self._see(view).clone()

    def launch(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Sequence[Buffer]) -> None:
        self.launch_call(take_apart(op, args, kwargs, [buffer.geometry for buffer in outputs]), outputs)

    def launch_call(self, call: EagerCall, outputs: Sequence[Buffer]) -> None:
        form = call.form
        self.launched.append(form.op)
        offsets = iter(call.offsets)
        views = [self._operand(*each, offsets) for each in zip(call.buffers, form.operands, strict=True)]
        given = (iter(views), iter(call.scalars))
        with torch.no_grad():
            args = [_argument(part, *given) for part in form.args]
            results = _call(form.op, args, {name: _argument(part, *given) for name, part in form.kwargs})
        assert [next(rest, None) for rest in given] == [None, None]
        if outputs:
            _keep(form.op, results, [self._tensor(buffer) for buffer in outputs])

    def synchronize(self) -> None:
        return None

    def stats(self, *, forget_peak: bool = False) -> Statistics:
        held = sum(tensor.nbytes for tensor in self.memory.values())
        return Statistics((WorkerStatistics(0, 0, len(self.memory), held, {}),), 0, 0, 0)

    def _tensor(self, buffer: Buffer) -> torch.Tensor:
        if buffer.id not in self.memory:
            tensor = torch.empty_strided(buffer.shape, buffer.strides, dtype=DTYPES[buffer.dtype], device="cpu")
            self.memory[buffer.id] = tensor
        return self.memory[buffer.id]

    def _see(self, view: View) -> torch.Tensor:
        return read_as(self._tensor(view.buffer), view.dtype, view.shape, view.strides, view.offset)

    def _operand(self, buffer: Buffer, form: OperandForm, offsets: Iterator[int]) -> torch.Tensor:
        assert form.storage is buffer.geometry
        if form.view is None:
            return self._see(View(buffer, buffer.shape, buffer.strides, 0, form.dtype))
        return self._see(View(buffer, *form.view, next(offsets), form.dtype))


def _argument(part: ArgSpec, views: Iterator[torch.Tensor], scalars: Iterator[Any]) -> Any:
    """An argument as `ArgSpec` describes it."""
    match part:
        case ("view",):
            return next(views)
        case ("views", count):
            return [next(views) for _ in range(count)]
        case ("scalar",):
            return next(scalars)
        case ("scalars", count):
            return [next(scalars) for _ in range(count)]
        case ("complex",):
            return complex(next(scalars), next(scalars))
        case ("number", dtype, number):
            return torch.tensor(_argument(number, views, scalars), dtype=DTYPES[dtype])
        case ("dtype", name):
            return DTYPES[name]
        case ("list", items):
            return [_argument(item, views, scalars) for item in items]
        case _:
            return part[1]


def _call(op: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if op == "moai.sdpa":
        query, key, value, mask, is_causal, scale = args
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
        )
    if op == "moai.sdpa_backward":
        grad, query, key, value, out, logsumexp, mask, is_causal, scale = args
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, logsumexp, 0.0, is_causal, attn_mask=mask, scale=scale
        )
    called = signature(op)
    return called.asked_for(called.overload(*args, **kwargs), tuple(args), kwargs)


def _keep(op: str, results: Any, places: list[torch.Tensor]) -> None:
    listed = [results] if isinstance(results, torch.Tensor) else [r for r in _flat(results) if r is not None]
    if op == "aten._native_batch_norm_legit":
        listed = listed[: len(places)]
    assert len(listed) == len(places), f"{op} gave {len(listed)} results for {len(places)}"
    for result, place in zip(listed, places, strict=True):
        assert result.shape == place.shape, f"{op} gave {result.shape}, not {place.shape}"
        assert result.dtype == place.dtype, f"{op} gave {result.dtype}, not {place.dtype}"
        place.copy_(result)


def _flat(results: Any) -> list[Any]:
    flat: list[Any] = []
    for result in results:
        flat += cast("list[Any]", result) if isinstance(result, list | tuple) else [result]
    return flat
