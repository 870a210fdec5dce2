"""Machines as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

from moaic.ir.errors import Diagnostic
from moaic.passes.perf.links import Level, Link
from moaic.passes.perf.machine import Machine, MadeKernel, WorkerKind
from moaic.passes.perf.numbers import ZERO, MeasureSource, Number


def to_text(machine: Machine) -> str:
    """JSON, in the form that `from_text` reads."""
    return json.dumps(
        {
            "name": machine.name,
            "workers": machine.workers,
            "memory": machine.memory,
            "bandwidth": _number_out(machine.bandwidth),
            "call_overhead": _number_out(machine.call_overhead),
            "launch": _number_out(machine.launch),
            "overlaps": machine.overlaps,
            "contention": machine.contention,
            "adds_traffic": machine.adds_traffic,
            "causal_block": machine.causal_block,
            "levels": [_level_out(level) for level in machine.levels],
            "flops": {key: _number_out(number) for key, number in sorted(machine.flops.items())},
            "links": {kind: _link_out(link) for kind, link in sorted(machine.links.items())},
            "kernels": machine.kernels and {key: _number_out(number) for key, number in machine.kernels.items()},
            "kinds": [_kind_out(kind) for kind in machine.kinds],
            "made": {key: [astuple(kernel) for kernel in kernels] for key, kernels in sorted(machine.made.items())},
        },
        indent=1,
    )


def from_text(text: str, name: str = "this") -> Machine:
    """Raises Diagnostic, which names the text, where a number is missing or is none."""
    try:
        data = json.loads(text)
        return Machine(
            name=str(data.get("name", "")),
            workers=int(data["workers"]),
            memory=int(data["memory"]),
            bandwidth=_number_in(data["bandwidth"]),
            call_overhead=_number_in(data["call_overhead"]),
            flops=_numbers_in(data["flops"]),
            launch=_number_in(data["launch"]) if "launch" in data else ZERO,
            overlaps=bool(data.get("overlaps", False)),
            contention=float(data.get("contention", 0.0)),
            adds_traffic=bool(data.get("adds_traffic", False)),
            causal_block=int(data.get("causal_block", 0)),
            levels=tuple(_level_in(level) for level in data.get("levels", [])),
            links={str(kind): _link_in(link) for kind, link in data.get("links", {}).items()},
            kernels=None if (known := data.get("kernels")) is None else _numbers_in(known),
            kinds=tuple(_kind_in(kind) for kind in data.get("kinds", [])),
            made={
                str(key): tuple(MadeKernel(*kernel) for kernel in kernels)
                for key, kernels in data.get("made", {}).items()
            },
        )
    except KeyError as error:
        raise Diagnostic(f"{name} does not describe a machine: it has no {error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise Diagnostic(f"{name} does not describe a machine: {error}") from error


def _link_out(link: Link) -> dict[str, object]:
    ends = {"latency": _number_out(link.latency), "rate": _number_out(link.rate)}
    return {**ends, "ranks": link.ranks, "direct": link.direct}


def _link_in(data: Mapping[str, Any]) -> Link:
    latency, rate = _number_in(data["latency"]), _number_in(data["rate"])
    return Link(latency, rate, int(data["ranks"]), bool(data.get("direct", False)))


def _level_out(level: Level) -> dict[str, object]:
    ends = {"latency": _number_out(level.latency), "rate": _number_out(level.rate)}
    return {"name": level.name, "workers": level.workers, **ends, "direct": level.direct}


def _level_in(data: Mapping[str, Any]) -> Level:
    latency, rate = _number_in(data["latency"]), _number_in(data["rate"])
    return Level(str(data["name"]), int(data["workers"]), latency, rate, bool(data.get("direct", False)))


def _kind_out(kind: WorkerKind) -> dict[str, object]:
    return {
        "name": kind.name,
        "workers": kind.workers,
        "memory": kind.memory,
        "bandwidth": _number_out(kind.bandwidth),
        "flops": {key: _number_out(number) for key, number in sorted(kind.flops.items())},
        "call_overhead": _number_out(kind.call_overhead),
        "launch": _number_out(kind.launch),
        "contention": kind.contention,
        "overlaps": kind.overlaps,
        "adds_traffic": kind.adds_traffic,
    }


def _kind_in(data: Mapping[str, Any]) -> WorkerKind:
    return WorkerKind(
        str(data["name"]),
        int(data["workers"]),
        int(data["memory"]),
        _number_in(data["bandwidth"]),
        _numbers_in(data["flops"]),
        _number_in(data["call_overhead"]),
        _number_in(data["launch"]),
        float(data["contention"]),
        bool(data["overlaps"]),
        bool(data["adds_traffic"]),
    )


def _number_out(number: Number) -> list[float | str]:
    return [number.value, str(number.source)]


def _numbers_in(numbers: Mapping[str, Any]) -> dict[str, Number]:
    return {str(key): _number_in(number) for key, number in numbers.items()}


def _number_in(pair: list[float | str]) -> Number:
    value, source = pair
    return Number(float(value), MeasureSource[str(source).upper()])
