"""Calibration: measures arithmetic, memory and collectives of this machine with all workers busy. Takes seconds, once.

The result is JSON, which the planner reads: passes and runtime do not import each other. The probes are ordinary
programs that run through the accelerator, uncompiled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, Final

import torch

from moaic.ir.graph import Attr, Function, Module, Op, Role, Value
from moaic.ir.layout import Layout, Mesh, Split
from moaic.ir.op_names import SCALED_MM, SDPA, SDPA_BACKWARD
from moaic.ir.ops import declaration_of
from moaic.ir.printer import render
from moaic.ir.types import TensorType
from moaic.runtime.controller.accelerator import Accelerator
from moaic.runtime.controller.probe_inputs import kernel_inputs_of
from moaic.runtime.host.cluster_settings import cluster_settings
from moaic.runtime.host.cores import cores
from moaic.runtime.host.env_flags import GraphMode
from moaic.runtime.host.flavors import Flavor
from moaic.runtime.host.folders import cluster_file
from moaic.runtime.host.gpus import usable
from moaic.runtime.host.memory import USABLE, data_bytes, data_limit
from moaic.runtime.protocol.carrier import Carrier
from moaic.runtime.protocol.statistics import ProgramStatistics
from moaic.text.files import write_whole

VERSION: Final = 7
"""Version of the probes and the format; a new one invalidates saved measurements."""

AXIS: Final = "w"

ROUNDS: Final = 3
"""Measured rounds, after those that warm up libraries and memory."""

CAPTURED: Final = 2
"""More rounds that warm up a GPU: a program is captured in the third run, and then replayed without launches."""

GPU_SCALE: Final = 8
"""Factor on the dims of GPU probes, so that a kernel takes longer than its launch. Assumed, not measured."""

CAUSAL_BLOCK: Final = 512
"""Keys that PyTorch's attention for CPUs reads at once (`kvSplitSize` of FlashAttentionKernel.cpp): causal attention
over fewer skips none."""

COMPILED: Final = 2.5
"""Speed of exp in Inductor's kernels, which are right to 20 ulp, relative to the op alone: measured on a Zen CPU."""

OLD: Final = 7 * 86_400.0
"""Seconds after which a measurement may be of another machine under the same name."""

BUSY: Final = 2.0
"""Load per core above which the machine is busy: measurements are then repeated at the next quiet start."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One op, called `repeats` times on the same operands; `amount` is the FLOPs or bytes of one call."""

    name: str
    op: str
    operands: tuple[TensorType, ...]
    results: tuple[TensorType, ...]
    amount: float
    repeats: int
    attrs: Mapping[str, Attr] = field(default_factory=dict[str, Attr])


def measured(accelerator: Accelerator, flavor: Flavor, folder: Path | None) -> str:
    """The machine as JSON: read from `folder` if saved there before, else measured now and saved.

    A measurement made on a busy machine is used until this is called while the machine is not busy.
    """
    path = None if folder is None else _path(folder, flavor)
    busy = is_busy()
    if path is not None and path.exists():
        known = path.read_text(encoding="utf-8")
        if busy or not json.loads(known)["is_busy"]:
            return known
    text = json.dumps({**measure(accelerator, flavor), "is_busy": busy}, indent=1)
    if path is not None:
        _keep(path, text)
    return text


def is_busy() -> bool:
    """Whether other programs take so much of the machine that measurements say little."""
    return os.getloadavg()[0] > BUSY * cores()


def drop(folder: Path, flavor: Flavor, age: float = 0.0) -> bool:
    """Removes a measurement if it is so many seconds old; whether there was one."""
    path = _path(folder, flavor)
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime >= age:
            path.unlink()
            return True
    return False


def _path(folder: Path, flavor: Flavor) -> Path:
    return folder / f"machine-{fingerprint(flavor)}.json"


def measure(accelerator: Accelerator, flavor: Flavor) -> dict[str, Any]:
    """Run every probe on all workers; the slowest worker counts."""
    ranks = accelerator.flavor
    mesh = Mesh(((AXIS, ranks),))
    scale = GPU_SCALE if flavor.gpus else 1
    has_float8 = all(gpu.has_float8 for gpu in usable(os.environ)[: flavor.gpus])
    # A GPU computes all light ops faster than it reads their operands: the memory traffic hides them.
    light = [] if flavor.gpus else _light()
    block = 0 if flavor.gpus else CAUSAL_BLOCK
    probes = [*_arithmetic(scale, has_float8, block), *light, *_traffic(scale)]
    seconds = timed(accelerator, [_called(probe, mesh) for probe in probes])
    rates = {
        probe.name: probe.amount * probe.repeats / max(spent, 1e-9)
        for probe, spent in zip(probes, seconds, strict=True)
    }
    near = workers_of_each_host(flavor)
    levels: list[dict[str, Any]] = []
    if near == ranks:
        links = _measured_links(accelerator, mesh)
    else:
        hosts = ranks // near
        links = _measured_links(accelerator, Mesh((("host", hosts), (AXIS, near))))
        far = _measured_links(accelerator, Mesh(((AXIS, hosts), ("worker", near))))
        levels = [_level("host", near, near, links), _level("between hosts", ranks, hosts, far)]
    idle = _idle(accelerator)
    return {
        "name": _device(flavor),
        "workers": ranks,
        "memory": memory_per_worker(flavor, idle),
        "idle": idle,
        "bandwidth": _measured(rates.pop("bandwidth")),
        # Measured without Inductor's wrapper around the kernel.
        "call_overhead": [1.0 / rates.pop("calls"), "interpolated"],
        "flops": {
            name: [rate, "interpolated" if name.startswith("costly") else "measured"]
            for name, rate in sorted(rates.items())
        },
        "links": links,
        "levels": levels,
        "causal_block": block,
        "overlaps": accelerator.carrier is Carrier.NCCL,
    }


def workers_of_each_host(flavor: Flavor) -> int:
    """The number of workers of a host, if hosts are alike and have several; otherwise all count as near each other."""
    shares = {flavor.here, *(share.workers for share in flavor.hosts)}
    return flavor.workers if len(shares) > 1 else flavor.here if flavor.here > 1 else flavor.workers


def _measured_links(accelerator: Accelerator, mesh: Mesh) -> dict[str, Any]:
    """Latency and rate of each collective along an axis, while all its groups communicate."""
    ranks = mesh.size(AXIS)
    probes = _collectives(ranks) if ranks > 1 else []
    seconds = _timed_communication(accelerator, [_moved(probe, mesh) for probe in probes])
    each = [spent / probe.repeats for probe, spent in zip(probes, seconds, strict=True)]
    return _links(probes, each, ranks)


def _level(name: str, workers: int, units: int, links: Mapping[str, Any]) -> dict[str, Any]:
    """A level of links (`perf.links.Level`), from an all-gather over its units, in which each sends to all others."""
    gather = links["all_gather"]
    latency, rate = gather["latency"][0] / (units - 1), gather["rate"][0] * (units - 1) / units
    return {"name": name, "workers": workers, "latency": _measured(latency), "rate": _measured(rate), "direct": False}


def timed(accelerator: Accelerator, programs: Sequence[Module], rounds: int = ROUNDS) -> list[float]:
    """Seconds of each program, which does not communicate, on the slowest worker; GPUs replay it as a CUDA graph.

    The best of `rounds` counts: other processes use the machine too.
    """
    ops = [op for program in programs for op in program.functions[0].ops]
    graphs = GraphMode.NEVER if any(declaration_of(op).host_reads for op in ops) else GraphMode.ALONE
    numbers = [accelerator.load(render(program), compiled=False, graphs=graphs, module=program) for program in programs]
    return _rounds(accelerator, numbers, rounds, lambda program: program.elapsed)


def _timed_communication(accelerator: Accelerator, programs: Sequence[Module]) -> list[float]:
    numbers = [accelerator.load(render(program), compiled=False, module=program) for program in programs]
    return _rounds(accelerator, numbers, ROUNDS, lambda program: program.communicate)


def _rounds(
    accelerator: Accelerator, numbers: Sequence[int], rounds: int, spent: Callable[[ProgramStatistics], float]
) -> list[float]:
    inputs = [kernel_inputs_of(accelerator, number) for number in numbers]
    totals: list[list[float]] = []
    for _ in range(warm_up(accelerator) + rounds):
        for number, buffers in zip(numbers, inputs, strict=True):
            accelerator.run(number, buffers, [None] * len(accelerator.program(number).results))
        workers = accelerator.stats().workers
        totals.append([max(spent(worker.programs[number]) for worker in workers) for number in numbers])
    measured = list(pairwise(totals))[-rounds:]
    return [min(after[place] - before[place] for before, after in measured) for place in range(len(numbers))]


def warm_up(accelerator: Accelerator) -> int:
    """Runs of a program before those that are measured."""
    return 1 + (CAPTURED if accelerator.has_gpus else 0)


def _called(probe: Probe, mesh: Mesh) -> Module:
    """A program that calls a function of the probe's one op."""
    inner = tuple(Value(type_) for type_ in probe.operands)
    results = tuple(Value(type_) for type_ in probe.results)
    function = Function("probe", inner, (Op(probe.op, inner, results, probe.attrs),), results)
    return repeated(function, mesh, probe.repeats)


def repeated(function: Function, mesh: Mesh, repeats: int) -> Module:
    """A program that calls a function so many times on the same operands, which a CUDA graph reads in place."""
    params = tuple(Value(param.type) for param in function.params)
    roles = (Role("constant"),) * len(params)

    def call() -> Op:
        results = tuple(Value(result.type) for result in function.results)
        return Op("call", params, results, {"callee": function.name})

    calls = [call() for _ in range(repeats)]
    return Module((function, Function("main", params, tuple(calls), calls[-1].results[:1], roles)), mesh)


def _moved(probe: Probe, mesh: Mesh) -> Module:
    """A program that runs the probe's collective on fresh copies, as a collective may overwrite its operand."""
    (before,), (after,) = probe.operands, probe.results
    inner, copy = Value(before), Value(before)
    function = Function("copy", (inner,), (Op("aten.clone", (inner,), (copy,)),), (copy,))
    param = Value(before)
    ops: list[Op] = []
    for _ in range(probe.repeats):
        ops.append(Op("call", (param,), (Value(before),), {"callee": "copy"}))
        ops.append(Op(probe.op, ops[-1].results, (Value(after),), {"axis": AXIS}))
    return Module((function, Function("main", (param,), tuple(ops), ops[-1].results)), mesh)


def _arithmetic(scale: int, has_float8: bool, block: int) -> list[Probe]:
    return [
        *(
            _product(dtype, scale * size, repeats)
            for dtype, size, repeats in (("f32", 1024, 1), ("bf16", 1024, 1), ("f16", 1024, 1), ("f64", 512, 1))
        ),
        *([_narrow_product(scale * 1024)] if has_float8 else []),
        *_attention("f32", scale, block),
        *_attention("bf16", scale, block),
        _convolution(scale),
    ]


def _light() -> list[Probe]:
    """Functions such as exp. Arithmetic hides behind the traffic: 40 ops of a kernel of Inductor took no longer."""
    tile = TensorType("f32", (256, 256))
    return [Probe("costly.f32", "aten.exp", (tile,), (tile,), COMPILED * prod(tile.shape), 100)]


def _product(dtype: str, size: int, repeats: int) -> Probe:
    type_ = TensorType(dtype, (size, size))
    return Probe(f"mm.{dtype}", "aten.mm", (type_, type_), (type_,), 2.0 * size**3, repeats)


def _narrow_product(size: int) -> Probe:
    narrow, result = TensorType("f8e4m3fn", (size, size)), TensorType("bf16", (size, size))
    scale = TensorType("f32", (1, 1))
    return Probe("mm.f8", SCALED_MM, (narrow, narrow, scale, scale), (result,), 2.0 * size**3, 1, {"dtype": "bf16"})


def _attention(dtype: str, scale: int, block: int) -> list[Probe]:
    batch, heads, rows, width = 2 * scale, 8, 256 * scale, 64
    whole, sums = TensorType(dtype, (batch, heads, rows, width)), TensorType("f32", (batch, heads, rows))
    # Causal attention must do half of the work, as its FLOPs say; whole blocks are more.
    scores = batch * heads * rows * rows * (1 + min(block, rows) / rows)
    attrs: dict[str, Attr] = {"is_causal": True, "scale": 0.125}
    three = (whole, whole, whole)
    return [
        Probe(f"sdpa.{dtype}", SDPA, three, (whole, sums), 2 * scores * width, 1, attrs),
        Probe(
            f"sdpa_backward.{dtype}",
            SDPA_BACKWARD,
            (whole, *three, whole, sums),
            three,
            5 * scores * width,
            1,
            attrs,
        ),
    ]


def _convolution(scale: int) -> Probe:
    image, weight = TensorType("f32", (8 * scale, 64, 28, 28)), TensorType("f32", (64, 64, 3, 3))
    one, none = (1, 1), (0, 0)
    attrs: dict[str, Attr] = {"stride": one, "padding": one, "dilation": one, "output_padding": none}
    attrs |= {"transposed": False, "groups": 1}
    flops = 2.0 * 8 * scale * 28 * 28 * 64 * 64 * 9
    return Probe("convolution.f32", "aten.convolution", (image, weight), (image,), flops, 1, attrs)


def _traffic(scale: int) -> list[Probe]:
    count = scale * scale * (4 << 20)
    large, small = TensorType("f32", (count,)), TensorType("f32", (1,))
    return [
        Probe("bandwidth", "aten.neg", (large,), (large,), 2.0 * 4 * count, 4),
        Probe("calls", "aten.neg", (small,), (small,), 1.0, 100),
    ]


def _collectives(ranks: int) -> list[Probe]:
    """Each collective with a small and with a large tensor; the amount is the bytes of its larger side."""
    return [probe for rows, repeats in ((1, 10), (256, 2)) for probe in _collectives_of(rows * ranks, ranks, repeats)]


def _collectives_of(rows: int, ranks: int, repeats: int) -> list[Probe]:
    columns = 1024 * ranks
    by_rows = Layout((Split(AXIS, 0, rows // ranks),))
    by_columns = Layout((Split(AXIS, 1, columns // ranks),))
    partial, replicated = Layout(partial=(AXIS,)), Layout()
    whole_bytes = 4.0 * rows * columns
    kinds = [
        ("all_reduce", partial, replicated, whole_bytes),
        ("reduce_scatter", partial, by_rows, whole_bytes),
        ("all_gather", by_rows, replicated, whole_bytes),
        ("all_to_all", by_rows, by_columns, whole_bytes / ranks),
    ]
    shape = (rows, columns)
    return [
        Probe(
            name,
            f"moai.{name}",
            (TensorType("f32", shape, before),),
            (TensorType("f32", shape, after),),
            amount,
            repeats,
        )
        for name, before, after, amount in kinds
    ]


def _links(probes: Sequence[Probe], seconds: Sequence[float], ranks: int) -> dict[str, Any]:
    """Latency and rate of each collective: the line through its two measurements."""
    points: dict[str, list[tuple[float, float]]] = {}
    for probe, spent in zip(probes, seconds, strict=True):
        points.setdefault(probe.name, []).append((probe.amount, spent))
    return {name: _link(min(both), max(both), ranks) for name, both in points.items()}


def _link(small: tuple[float, float], large: tuple[float, float], ranks: int) -> dict[str, Any]:
    per_byte = max(large[1] - small[1], 0.05 * large[1]) / (large[0] - small[0])
    latency = max(small[1] - small[0] * per_byte, 1e-6)
    return {"latency": _measured(latency), "rate": _measured(1 / per_byte), "ranks": ranks}


def _measured(value: float) -> list[Any]:
    return [value, "measured"]


def memory_per_worker(flavor: Flavor, idle: Mapping[str, int]) -> int:
    """Bytes that one worker of a flavor has for tensors: its share of memory less the memory of an idle worker."""
    share = int(USABLE * flavor.per_worker) - idle["pss"]
    most = None if flavor.gpus else data_limit()
    return share if most is None else min(share, int(USABLE * (most - idle["data"])))


def _idle(accelerator: Accelerator) -> dict[str, int]:
    """The largest worker's bytes: resident memory except its tensors, and private memory in all."""
    workers = accelerator.stats().workers
    # Workers are alike; of those of other hosts no process is here.
    here = [worker for worker, host in zip(workers, accelerator.hosts, strict=True) if not host]
    return {
        "pss": max(worker.pss - worker.bytes for worker in workers),
        "data": max(data_bytes(worker.pid) for worker in here),
    }


def fingerprint(flavor: Flavor) -> str:
    """A digest of the properties of the machine on which the measurements depend."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    size = [flavor.workers, flavor.memory]
    device = [_device(flavor), *set(flavor.devices)]
    facts: list[Any] = [VERSION, *device, cores(), size, torch.__version__, threads, data_limit(), *flavor.hosts]
    if flavor.hosts:
        # It decides what carries data between GPUs.
        settings = cluster_settings(cluster_file(os.environ))
        facts.append(settings is not None and settings.trusted_network)
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _device(flavor: Flavor) -> str:
    """The names of the GPUs or of the processor on which the workers compute."""
    return ", ".join(gpu.name for gpu in usable(os.environ)[: flavor.gpus]) if flavor.gpus else _processor()


def _processor() -> str:
    """The processor's model name and a digest of its feature flags, which affect speed too."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    facts = dict(line.split(":", 1) for line in reversed(lines) if line.startswith(("model name", "flags", "cpu MHz")))
    known = {key.strip(): value.strip() for key, value in facts.items()}
    flags = hashlib.sha256(known.get("flags", "").encode()).hexdigest()[:6]
    return f"{known.get('model name', platform.processor() or platform.machine())} {flags}"


def _keep(path: Path, text: str) -> None:
    """Save the measurements if the folder is writable: training works without a saved file."""
    with contextlib.suppress(OSError):
        write_whole(path, text)
