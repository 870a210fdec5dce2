"""Clusters as TOML: kinds of devices, the levels of links that join them, and hosts.

The file is `cluster.toml`, whose hosts the runtime reads, too; those of `clusters` describe kinds of hosts, of which
there may be any number. A number is plain, then it is assumed, or has its source: `rate = [450e9, "published"]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Final, TypeGuard, cast

from moaic.ir.errors import Diagnostic
from moaic.ir.types import DTYPE_BYTES
from moaic.passes.perf.links import Level
from moaic.passes.perf.machine import ASSUMED_OVERHEAD, Machine, MadeKernel, WorkerKind
from moaic.passes.perf.numbers import ZERO, MeasureSource, Number
from moaic.runtime.host.cluster import EXAMPLE as HOST_EXAMPLE
from moaic.runtime.host.cluster import HOST_KEYS, SINGLE, TABLES
from moaic.runtime.host.gpu_specs import LAUNCH_SECONDS, Target, target_of
from moaic.runtime.host.memory import USABLE
from moaic.runtime.host.toml_tables import TomlTable, read_tables

UNLIMITED: Final = 1 << 40
"""Workers of the level that joins all hosts."""

DEVICE_EXAMPLE: Final = (
    'a device reads [[device]] and, below, name = "h100", target = "sm_90" and perhaps memory = "79GB", '
    "bandwidth = 3.35e12, matmul = {bf16 = 989e12}, efficiency = {matmul = 0.7}"
)

LINK_EXAMPLE: Final = (
    'a link reads [[link]] and, below, level = "host", joins = 8, rate = 450e9 and latency = 5e-6; the last one joins '
    "all hosts and has no joins"
)

DEVICE_KEYS: Final = (
    *("name", "target", "memory", "bandwidth", "matmul", "vector", "efficiency", "overhead", "launch", "contention"),
)
LINK_KEYS: Final = ("level", "joins", "rate", "latency", "direct", "shared")

EXAMPLES: Final[Mapping[str, str]] = {
    "matmul": '{bf16 = [989e12, "published"]}',
    "efficiency": '{matmul = [0.7, "measured"]}',
    "contention": '[0.1, "measured"]',
    **dict.fromkeys(("latency", "overhead", "launch"), '[5e-6, "measured"]'),
}
"""What a key may be, where that is no rate."""

MOST: Final = 1e21
"""Above all rates there are."""

MAY_BE_ZERO: Final = ("latency", "overhead", "launch", "contention")

LATENCY: Final = 5e-6
"""Seconds of a message. Assumed."""

EFFICIENCIES: Final[Mapping[str, Number]] = {
    "matmul": Number(1.0, MeasureSource.MEASURED),
    "attention": Number(0.35),
    "attention_backward": Number(0.35),
    "bandwidth": Number(1.0, MeasureSource.MEASURED),
}
"""Shares of the peaks that kernels reach, unless a file says others: rates are peaks then, and attention assumed."""

ATTENTION: Final[Mapping[str, str]] = {"attention": "sdpa", "attention_backward": "sdpa_backward"}
"""Families of ops, by the name of their efficiency."""

FUSED: Final = ("bf16", "f16")
"""Types for which attention is one kernel."""


@dataclass(frozen=True, slots=True)
class Device:
    """A kind of device: bytes, bytes per second, and FLOPs per second that kernels reach, by `family.dtype`."""

    name: str
    target: Target | None
    memory: int
    bandwidth: Number
    rates: Mapping[str, Number]
    overhead: Number
    launch: Number
    contention: float

    @property
    def is_gpu(self) -> bool:
        """Whether it computes while a collective runs, and arithmetic and traffic of its kernels add up."""
        return self.target is not None


@dataclass(frozen=True, slots=True)
class Hosts:
    """Hosts alike: their number, the workers of each, and the kind of device of these."""

    count: int
    workers: int
    device: Device


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices and their links; without hosts any number of workers."""

    name: str
    devices: tuple[Device, ...]
    levels: tuple[Level, ...]
    hosts: tuple[Hosts, ...]
    path: Path

    @property
    def workers(self) -> int | None:
        """The number of workers of all hosts; None for any number."""
        return sum(each.count * each.workers for each in self.hosts) if self.hosts else None

    @property
    def device(self) -> Device:
        """The slowest kind of device."""
        return min((each.device for each in self.hosts), key=_speed, default=min(self.devices, key=_speed))

    def machine(self, workers: int, made: Mapping[str, tuple[MadeKernel, ...]] | None = None) -> Machine:
        """As many workers of the cluster, the fastest, and the known kernels. Raises Diagnostic where it has fewer."""
        if self.workers is not None and workers > self.workers:
            raise Diagnostic(f"the hosts of {self.path} have {self.workers} workers, not {workers}")
        device, kinds = self.device, self._kinds()
        return Machine(
            workers,
            min([int(USABLE * device.memory), *(kind.memory for kind in kinds)]),
            device.bandwidth,
            device.rates,
            call_overhead=device.overhead,
            name=self._named(device),
            launch=device.launch,
            overlaps=device.is_gpu or any(kind.overlaps for kind in kinds),
            contention=device.contention,
            adds_traffic=device.is_gpu,
            levels=self.levels,
            made=made or {},
            kinds=kinds,
        )

    def _kinds(self) -> tuple[WorkerKind, ...]:
        """The kinds of workers, the fastest first; none where all are equal."""
        hosts = sorted(self.hosts, key=lambda host: _speed(host.device), reverse=True)
        kinds = [[*alike] for _, alike in groupby(hosts, lambda host: (host.device.name, host.device.memory))]
        if len(kinds) <= 1:
            return ()
        return tuple(self._kind(alike[0].device, sum(host.count * host.workers for host in alike)) for alike in kinds)

    def _kind(self, device: Device, workers: int) -> WorkerKind:
        return WorkerKind(
            self._named(device),
            workers,
            int(USABLE * device.memory),
            device.bandwidth,
            device.rates,
            device.overhead,
            device.launch,
            device.contention,
            device.is_gpu,
            device.is_gpu,
        )

    def _named(self, device: Device) -> str:
        return f"{device.name}, {self.name}"


def _speed(device: Device) -> tuple[float, float, str, int]:
    """Orders devices by the rate of products, then by that of memory; those alike are side by side."""
    rate = device.rates.get("mm.bf16", device.rates["mm.f32"])
    return rate.value, device.bandwidth.value, device.name, device.memory


def read_cluster(path: Path) -> Cluster:
    """The cluster that a file describes. Raises Diagnostic, which names the table, for what is wrong."""
    examples = {"device": DEVICE_EXAMPLE, "link": LINK_EXAMPLE, "host": HOST_EXAMPLE}
    devices, links, hosts = (read_tables(path, kind, example, TABLES, SINGLE) for kind, example in examples.items())
    if not devices:
        raise Diagnostic(f"{path} describes no device", hint=DEVICE_EXAMPLE)
    kinds = [_device(table) for table in devices]
    for at, table in enumerate(devices):
        if any(kinds[at].name == other.name for other in kinds[:at]):
            raise Diagnostic(f"device `{kinds[at].name}` is described twice", table.place("name"))
    levels, found = _levels(links, path), tuple(_hosts(table, kinds) for table in hosts)
    _check_sizes(levels, found, hosts)
    return Cluster(path.stem, tuple(kinds), levels, found, path)


def _device(table: TomlTable) -> Device:
    table.check_keys(DEVICE_KEYS)
    target, reached = _target(table), _efficiency(table)
    peaks = {} if target is None else {f"mm.{dtype}": _published(rate) for dtype, rate in target.matmul.items()}
    peaks |= {f"mm.{dtype}": _number(table, "matmul", rate) for dtype, rate in _inner(table, "matmul").items()}
    if unknown := [name for name in _inner(table, "matmul") if name not in (*DTYPE_BYTES, "f8")]:
        raise Diagnostic(f"there is no element type `{unknown[0]}`", table.place("matmul"), hint=DEVICE_EXAMPLE)
    if "mm.f32" not in peaks:
        raise Diagnostic("a device needs a rate of matrix products in f32", table.place("matmul"), hint=DEVICE_EXAMPLE)
    products = {key: _scaled(peak, reached["matmul"]) for key, peak in peaks.items()}
    attention = {
        f"{family}.{dtype}": _scaled(peaks[f"mm.{dtype}"], reached[kind])
        for kind, family in ATTENTION.items()
        for dtype in FUSED
        if f"mm.{dtype}" in peaks
    }
    vector = _given(table, "vector", target and _published(target.vector))
    bandwidth = _given(table, "bandwidth", target and _published(target.bandwidth))
    return Device(
        table.name(),
        target,
        table.memory(None) if target is None or "memory" in table.values else target.memory,
        _scaled(bandwidth, reached["bandwidth"]),
        {**products, **attention, "cheap.f32": vector, "costly.f32": vector},
        _given(table, "overhead", ASSUMED_OVERHEAD),
        _given(table, "launch", Number(LAUNCH_SECONDS) if target else ZERO),
        _given(table, "contention", ZERO).value,
    )


def _target(table: TomlTable) -> Target | None:
    if "target" not in table.values:
        return None
    try:
        return target_of(str(table.values["target"]))
    except Diagnostic as error:
        raise Diagnostic(error.message, table.place("target"), hint=error.hint) from None


def _efficiency(table: TomlTable) -> Mapping[str, Number]:
    given = _inner(table, "efficiency")
    found: dict[str, Number] = {}
    for kind, share in given.items():
        if kind not in EFFICIENCIES:
            raise Diagnostic(f"there is no efficiency of `{kind}`", table.place("efficiency"), hint=DEVICE_EXAMPLE)
        found[kind] = _number(table, "efficiency", share)
        if found[kind].value > 1:
            raise Diagnostic(
                f"the efficiency of {kind} is a share from 0 to 1 of the peak, not `{share}`", table.place("efficiency")
            )
    return {**EFFICIENCIES, **found}


def _levels(tables: Sequence[TomlTable], path: Path) -> tuple[Level, ...]:
    """The levels, the innermost first: each joins more workers than the one before it, the last joins all."""
    levels: list[Level] = []
    for table in tables:
        table.check_keys(LINK_KEYS)
        name, is_last = table.values.get("level"), table is tables[-1]
        if not isinstance(name, str) or not name.isprintable() or name in ("", *(level.name for level in levels)):
            raise Diagnostic("a link needs a level, a name of its own", table.place("level"), hint=LINK_EXAMPLE)
        below = levels[-1].workers if levels else 1
        joins = below * UNLIMITED if is_last else table.values.get("joins")
        if is_last and "joins" in table.values:
            raise Diagnostic(f"link `{name}` is the last, which joins all", table.place("joins"), hint=LINK_EXAMPLE)
        if not isinstance(joins, int) or joins <= below or joins % below:
            most = f"a multiple of the {below} of the level before" if levels else "at least 2"
            raise Diagnostic(
                f"link `{name}` needs joins, a whole number of workers: {most}",
                table.place("joins"),
                hint=LINK_EXAMPLE,
            )
        if is_last and _flag(table, "direct"):
            raise Diagnostic(
                f"link `{name}` is the last, which joins any number: it has no link for every pair",
                table.place("direct"),
                hint="a level of pairs has joins, and a level above it",
            )
        rate, shared = _given(table, "rate", None), _flag(table, "shared")
        latency = _given(table, "latency", Number(LATENCY))
        each = Number(rate.value / (below if shared else 1), rate.source)
        levels.append(Level(name, joins, latency, each, _flag(table, "direct")))
    if not levels:
        raise Diagnostic(f"{path} describes no link", hint=LINK_EXAMPLE)
    return tuple(levels)


def _check_sizes(levels: Sequence[Level], hosts: Sequence[Hosts], tables: Sequence[TomlTable]) -> None:
    """Raises Diagnostic where hosts are not units of a level: workers are numbered host by host."""
    if len(hosts) == 1 and hosts[0].count == 1:
        return
    joined = {level.workers for level in levels[:-1]} or {host.workers for host in hosts[:1]}
    for host, table in zip(hosts, tables, strict=True):
        if host.workers != hosts[0].workers or host.workers not in joined:
            raise Diagnostic(
                f"a host of {host.workers} workers beside a level of {max(joined)}: all hosts have as many "
                "workers as one level joins",
                table.place("workers"),
                hint=LINK_EXAMPLE,
            )


def _hosts(table: TomlTable, devices: Sequence[Device]) -> Hosts:
    table.check_keys(HOST_KEYS)
    named = {device.name: device for device in devices}
    device = named.get(str(table.values.get("device", devices[0].name)))
    if device is None:
        known = ", ".join(f'"{name}"' for name in named)
        raise Diagnostic(
            f"there is no device `{table.values['device']}`", table.place("device"), hint=f"known: {known}"
        )
    if "memory" in table.values:
        device = replace(device, memory=table.memory(None) // table.workers())
    return Hosts(table.count(), table.workers(), device)


def _given(table: TomlTable, key: str, default: Number | None) -> Number:
    """The number of a key, or the default. Raises Diagnostic where there is neither, or it is none."""
    if key in table.values:
        return _number(table, key, table.values[key])
    if default is None:
        raise Diagnostic(f"a {table.kind} needs {key}, a number", table.place(key), hint=table.example)
    return default


def _number(table: TomlTable, key: str, given: object) -> Number:
    """A plain number, or one with its source. Raises Diagnostic."""
    value, source = (given[0], given[1]) if _is_pair(given) else (given, "assumed")
    known = [str(each) for each in MeasureSource]
    example = EXAMPLES.get(key, '[3.35e12, "published"]')
    hint = f"for example {key} = {example}; sources are {', '.join(known)}"
    if not isinstance(value, int | float) or isinstance(value, bool) or source not in known:
        raise Diagnostic(f"{key} is a number, or a number and its source, not `{given}`", table.place(key), hint=hint)
    least = "at least 0" if key in MAY_BE_ZERO else "above 0"
    if not 0 <= value < MOST or (value == 0 and key not in MAY_BE_ZERO):
        raise Diagnostic(f"{key} is a number {least} and below {MOST:g}", table.place(key), hint=hint)
    return Number(float(value), MeasureSource[str(source).upper()])


def _is_pair(given: object) -> TypeGuard[Sequence[object]]:
    return isinstance(given, list) and len(cast("list[object]", given)) == 2


def _inner(table: TomlTable, key: str) -> Mapping[str, Any]:
    """The inline table of a key; empty if there is none."""
    found = table.values.get(key, {})
    if not isinstance(found, dict):
        raise Diagnostic(f"{key} is a table such as {{bf16 = 989e12}}", table.place(key), hint=table.example)
    return cast("dict[str, Any]", found)


def _flag(table: TomlTable, key: str) -> bool:
    found = table.values.get(key, False)
    if not isinstance(found, bool):
        raise Diagnostic(f"{key} is true or false, not `{found}`", table.place(key), hint=table.example)
    return found


def _scaled(number: Number, share: Number) -> Number:
    return Number(share.value * number.value, max(number.source, share.source))


def _published(value: float) -> Number:
    return Number(value, MeasureSource.PUBLISHED)
