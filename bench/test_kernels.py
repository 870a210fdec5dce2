"""All kernels, parked ones too, on this machine's GPU, beside Inductor's version and Liger-Kernel's.

The output under `gains` is the table for `runtime/kernels/gains.py`. Times are of forward and backward together.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from statistics import median
from typing import Any, cast

import pytest
import torch
from parked_kernels import adamw, bucket, dropout
from parked_kernels.catalogue import ALL_KERNELS, table_of, tile_of
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from moaic.runtime.codegen.lower_random import teach_inductor
from moaic.runtime.kernels.fused import exchange, gated, merge, norm, rotary
from moaic.runtime.kernels.gains import KernelShape
from moaic.runtime.kernels.triton_launch import Tile, target_of

Results = tuple[Tensor, ...]
Run = Callable[[], Results]
"""Results and gradients of one forward and backward."""


@dataclass(frozen=True, slots=True)
class Peers:
    """One computation in several ways, on the same inputs."""

    ours: Run
    plain: Callable[..., Any]
    """What Inductor compiles: the reference."""
    inputs: tuple[Any, ...]
    grads: tuple[Tensor, ...]
    """Of what `plain` gives."""
    liger: Callable[[Any], Results] | None = None
    """Given the module `liger_kernel.transformers.functional`."""


def trained(function: Callable[..., Any], inputs: tuple[Any, ...], grads: tuple[Tensor, ...]) -> Results:
    """Results, and gradients of the inputs that want one."""
    made = function(*inputs)
    results = cast("Results", made if isinstance(made, tuple) else (made,))
    wanting = [each for each in inputs if isinstance(each, Tensor) and each.requires_grad]
    if not wanting:
        return results
    return (*results, *torch.autograd.grad(results, wanting, grads))


def normal(*shape: int, device: torch.device, dtype: torch.dtype = torch.bfloat16, leaf: bool = False) -> Tensor:
    return torch.randn(*shape, device=device, dtype=dtype).requires_grad_(leaf)


def adamw_step(shape: KernelShape, device: torch.device, tile: Tile) -> Peers:
    settings, scale = adamw.AdamW(), torch.tensor(0.5, device=device)
    master, mean, square = (normal(*shape, device=device, dtype=torch.float32) for _ in range(3))
    square.abs_()
    grad, copy = normal(*shape, device=device), normal(*shape, device=device)

    def ours() -> Results:
        adamw.update(master, grad, mean, square, scale, 3, settings, tile, copy)
        return (copy,)

    def plain(master: Tensor, grad: Tensor, mean: Tensor, square: Tensor, copy: Tensor) -> Tensor:
        adamw.reference(master, grad, mean, square, scale, 3, settings)
        return copy.copy_(master)

    own = (master.clone(), grad, mean.clone(), square.clone(), copy.clone())
    return Peers(ours, plain, own, ())


def rms_norm(shape: KernelShape, device: torch.device, tile: Tile) -> Peers:
    x, residual = (normal(*shape, device=device, leaf=True) for _ in range(2))
    weight = normal(shape[-1], device=device, leaf=True)
    grads = (normal(*shape, device=device), normal(*shape, device=device))

    def ours() -> Results:
        with torch.no_grad():
            made = norm.forward(x, weight, 1e-5, tile, residual=residual, layer=False)
            back = norm.backward(grads[0], weight, made, tile, through=grads[1])
            return made.y, made.total, back.x, back.x, back.weight.to(weight.dtype)

    def plain(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return norm.reference(x, weight, 1e-5, residual=residual, layer=False)

    def liger(functional: Any) -> Results:
        return trained(partial(functional.liger_fused_add_rms_norm, eps=1e-5), (x, residual, weight), grads)

    return Peers(ours, plain, (x, residual, weight), grads, liger)


def swiglu(shape: KernelShape, device: torch.device, tile: Tile) -> Peers:
    gate, up = (normal(*shape, device=device, leaf=True) for _ in range(2))
    grad = normal(*shape, device=device)

    def ours() -> Results:
        with torch.no_grad():
            made = gated.forward(gate, up, gated.Act.SILU, tile)
            return made, *gated.backward(grad, gate, up, gated.Act.SILU, tile)

    def plain(gate: Tensor, up: Tensor) -> Tensor:
        return gated.reference(gate, up, gated.Act.SILU)

    def liger(functional: Any) -> Results:
        return trained(functional.liger_swiglu, (gate, up), (grad,))

    return Peers(ours, plain, (gate, up), (grad,), liger)


def turned(shape: KernelShape, device: torch.device, tile: Tile) -> Peers:
    """With QK norm, on heads as a projection gives them."""
    batch, heads, tokens, width = shape
    x = normal(batch, tokens, heads, width, device=device, leaf=True)
    weight = normal(width, device=device, leaf=True)
    grad = normal(*shape, device=device)
    angle = torch.rand(1, tokens, width, device=device)
    cos, sin = angle.cos(), angle.sin()

    def ours() -> Results:
        with torch.no_grad():
            made = rotary.forward(x.transpose(1, 2), cos, sin, tile, weight=weight, eps=1e-5)
            dx, dw = rotary.backward(grad, x.transpose(1, 2), cos, sin, tile, weight=weight, eps=1e-5)
            assert dw is not None
            return made, dx.transpose(1, 2), dw.to(weight.dtype)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return rotary.reference(x.transpose(1, 2), cos, sin, weight, 1e-5).to(x.dtype)

    return Peers(ours, plain, (x, weight), (grad,))


def dropped(shape: KernelShape, device: torch.device, tile: Tile) -> Peers:
    """Inductor's version draws the same numbers: it is what moaic compiles today."""
    teach_inductor()
    from moaic.ir.graph import Op, Value
    from moaic.ir.types import TensorType
    from moaic.runtime.codegen.lower_to_fx import run_op

    key, p = torch.tensor([7, 11], device=device), 0.1
    op = Op("moai.rand", (Value(TensorType("i64", (2,))),), (Value(TensorType("f32", shape)),), {})
    x, grad = normal(*shape, device=device, leaf=True), normal(*shape, device=device)
    place = dropout.place_of(shape, shape, [], [], device)

    def ours() -> Results:
        with torch.no_grad():
            return dropout.forward(x, key, place, p, tile), dropout.forward(grad, key, place, p, tile)

    def plain(x: Tensor) -> Tensor:
        return dropout.reference(x, run_op(op, [key], device)[0], p)

    return Peers(ours, plain, (x,), (grad,))


def merged(shape: KernelShape, device: torch.device, tile: Tile) -> Peers:
    out = normal(*shape, device=device, dtype=torch.float32)
    largest, logsumexp = (normal(*shape[:-1], device=device, dtype=torch.float32) for _ in range(2))
    weight, more = torch.ones_like(largest), normal(*shape, device=device)

    def ours() -> Results:
        merge.merge(out, weight, largest, more, logsumexp, tile)
        return out, weight, largest

    def plain(out: Tensor, weight: Tensor, largest: Tensor, more: Tensor, logsumexp: Tensor) -> Results:
        merge.reference(out, weight, largest, more, logsumexp)
        return out, weight, largest

    return Peers(ours, plain, (out.clone(), weight.clone(), largest.clone(), more, logsumexp), ())


def packed(shape: KernelShape, device: torch.device, tile: Tile) -> Peers:
    """Float32 gradients of 48 tensors, some large and some small, into a bucket of bfloat16 and back."""
    (elements,) = shape
    large = elements // 32 // 7 * 7
    sizes = [*([large] * 31), *([7] * 16), elements - 31 * large - 16 * 7]
    tensors: Results = torch.split(normal(elements, device=device, dtype=torch.float32), sizes)
    into, scale = normal(elements, device=device), torch.tensor(0.5, device=device)
    chunks = bucket.chunks_of(tensors, tile)

    def ours() -> Results:
        bucket.pack(chunks, into, scale, tile)
        bucket.unpack(chunks, into, 1 / scale, tile)
        return into, *tensors

    def plain(into: Tensor, *tensors: Tensor) -> Results:
        bucket.reference(tensors, into, scale)
        parts: Results = torch.split(into, sizes)
        for each, its in zip(tensors, parts, strict=True):
            each.copy_(its / scale)
        return into, *tensors

    return Peers(ours, plain, (into.clone(), *(each.clone() for each in tensors)), ())


def exchanged(shape: KernelShape, device: torch.device, tile: Tile) -> Peers:
    """Heads of a rank's tokens into a part for each rank, and parts from each rank into one tensor."""
    count, runs, run = shape
    x = normal(runs, count * run, device=device)

    def ours() -> Results:
        parts = exchange.pack(x, 1, run, count, tile)
        return parts, exchange.unpack(parts, 1, run, tile)

    def plain(x: Tensor) -> Results:
        parts = exchange.reference(x, 1, run, count)
        return parts, exchange.reference_join(parts, 1, run)

    return Peers(ours, plain, (x,), ())


PEERS: Mapping[str, Callable[[KernelShape, torch.device, Tile], Peers]] = {
    "adamw": adamw_step,
    "norm": rms_norm,
    "gated": swiglu,
    "rotary": turned,
    "dropout": dropped,
    "merge": merged,
    "bucket": packed,
    "exchange": exchanged,
}


def agree(peers: Peers) -> None:
    """Nothing is timed that computes something else: bfloat16 results are compared."""
    for ours, theirs in zip(peers.ours(), trained(peers.plain, peers.inputs, peers.grads), strict=True):
        scale = float(theirs.detach().abs().max())
        torch.testing.assert_close(ours.float(), theirs.detach().float(), rtol=0.03, atol=0.03 * scale)


REPEATED = 10

CACHE = 1 << 28
"""Bytes, more than the cache of a GPU."""

LAUNCHING = 10_000_000
"""Cycles of a GPU, some milliseconds: longer than the host needs for the launches of a run, autograd's included."""


def seconds(run: Callable[[], Any]) -> float:
    """Of the GPU, the median of some runs: it is kept busy until the host has launched all kernels of a run."""
    times = [_on_gpu(run) for _ in range(REPEATED)]
    return median(times)


def _on_gpu(run: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # Nothing of the operands is left in the cache.
    torch.empty(CACHE, dtype=torch.int8, device="cuda").zero_()
    cuda: Any = torch.cuda
    cuda._sleep(LAUNCHING)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def peak(run: Callable[[], Any]) -> int:
    """Bytes that a run has at most beyond what there was."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before


def runs_of(peers: Peers) -> dict[str, Callable[[], Any]]:
    compiled = torch.compile(peers.plain, fullgraph=True)
    found: dict[str, Callable[[], Any]] = {
        "ours": peers.ours,
        "inductor": partial(trained, compiled, peers.inputs, peers.grads),
    }
    try:
        functional = importlib.import_module("liger_kernel.transformers.functional")
    except ImportError:
        return found
    return found | ({} if peers.liger is None else {"liger": partial(peers.liger, functional)})


def compare(name: str, shape: KernelShape, tile: Tile) -> dict[str, dict[str, float]]:
    peers = PEERS[name](shape, torch.device("cuda"), tile)
    agree(peers)
    figures: dict[str, dict[str, float]] = {}
    for peer, run in runs_of(peers).items():
        run()
        figures[peer] = {"seconds": seconds(run), "bytes": float(peak(run))}
    return figures


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "shape"), [(kernel.name, shape) for kernel in ALL_KERNELS.values() for shape in kernel.shapes]
)
def test_kernel(benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], name: str, shape: KernelShape) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU here: kernels are timed on one; tests/kernels checks them without")
    target = target_of(torch.device("cuda", 0))
    tile = tile_of(name, target, shape)
    if tile is None:
        pytest.skip(f"{name} is not cut for {target} at {shape}: {table_of(name)} lists its tiles")
    found = cast(
        "dict[str, dict[str, float]]", benchmark.pedantic(compare, args=(name, shape, tile), rounds=1, iterations=1)
    )
    gain = found["inductor"]["seconds"] / found["ours"]["seconds"]
    benchmark.extra_info.update({"figures": found, "gain": gain, "elements": prod(shape)})
    rows = (f"{peer} {1e3 * each['seconds']:.3f} ms, {each['bytes'] / 1e6:.0f} MB" for peer, each in found.items())
    with capsys.disabled():
        print(f"\n{name} {shape}: {'; '.join(rows)}\ngains: {target!r}: {{{shape}: {gain:.2f}}}")
