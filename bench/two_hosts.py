"""Two hosts beside one: the demo's Llama on two workers, and 64 MiB added up beside gloo. Needs root and iproute2.

The hosts are network namespaces of this machine with a core each and nodes of a Ray cluster, with TLS and a token; one
host has both cores. Runs alternate. Prints the losses, seconds of a step and of starts by Ray and by `connect`, what
crossed the network, and the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from moaic.runtime.launch.identity import Authority
from moaic.runtime.launch.local_workers import KEEP_MEMORY
from moaic.runtime.protocol.frames import encode
from moaic.runtime.protocol.peers import PeerAddress, Peers
from tests.cluster.hosts import ROOT, Hosts, Network, may_make_namespaces, on_cores
from tests.cluster.ray_nodes import RayNodes

HELD_OUT = re.compile(r"loss on held-out text .*")

STEP = re.compile(r"^step +\d+ +loss +([0-9.]+) +([0-9.]+) s", re.MULTILINE)

SETTINGS = {"MOAI_COMPILE": "wait", "MOAI_LOG": "info"}

UNSTEADY = 12
"""First steps, among them those that run op by op or wait for a measurement."""


START = """
import time
began = time.monotonic()
import torch
torch.ones(1).to("moai").cpu()
print("ready", time.monotonic() - began)
"""

Launch = Callable[[Sequence[str]], str]
"""Runs a program over both hosts; what it printed."""


def by_connect(hosts: Hosts, command: Sequence[str]) -> str:
    hosts.write()
    code, text = hosts.run(command, 600, **SETTINGS)
    hosts.end()
    return _checked(code, text)


def by_ray(nodes: RayNodes, hosts: Hosts, command: Sequence[str]) -> str:
    hosts.write(launcher="ray", port=0)
    program = hosts.start(command, **SETTINGS, **nodes.environment(), MOAI_TOKEN="")
    text, _ = program.communicate(timeout=600)
    return _checked(program.returncode, text)


def _checked(code: int, text: str) -> str:
    if code:
        raise SystemExit(text)
    return text


def seconds_to_start(launch: Launch) -> float:
    """Seconds from the first import of PyTorch until a tensor has been on both hosts' accelerator and back."""
    return float(launch(["-c", START]).rpartition("ready ")[2])


def train_on_one(steps: int, folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MOAI_FLAVOR": "2", "MOAI_COMPILE": "wait"}
    environment["XDG_CONFIG_HOME"] = str(folder / "none")
    command = [*on_cores(0, 2), sys.executable, *example(steps, folder)]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, cwd=folder).stdout


def example(steps: int, folder: Path) -> list[str]:
    script = str(ROOT / "examples/train_llama2.py")
    return [script, "--device", "moai", "--steps", str(steps), "--save", str(folder / "model")]


def losses_and_seconds(text: str) -> tuple[list[str], float]:
    found = STEP.findall(text)
    return [loss for loss, _ in found], statistics.median(float(seconds) for _, seconds in found[UNSTEADY:])


def all_reduce(network: Network, kind: str, folder: Path) -> dict[int, float]:
    """Seconds by bytes."""
    authority = Authority("bench")
    names = ["host/a", "host/b"]
    made = [authority.credentials(name) for name in names]
    addresses = tuple(PeerAddress(network.address(rank), 5001 + rank, names[rank]) for rank in range(2))
    processes: list[subprocess.Popen[str]] = []
    for rank, mine in enumerate(made):
        file = folder / f"peers{rank}"
        file.write_bytes(encode(Peers(addresses, rank, 1, mine.certificate, mine.key, mine.authority).encoded()))
        third = str(file) if kind == "links" else network.interface(rank)
        words = [str(ROOT / "bench/all_reduce_over_hosts.py"), kind, str(rank), network.address(0), third]
        command = ["ip", "netns", "exec", network.name(rank), sys.executable, *words]
        environment = {**KEEP_MEMORY, **os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            command,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        processes.append(process)
    for process in processes if kind == "links" else ():
        assert process.stdout is not None
        process.stdout.readline()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    outs = [process.communicate(timeout=120)[0] for process in processes]
    return {int(size): float(seconds) for size, seconds in (line.split() for line in outs[0].splitlines())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if not may_make_namespaces():
        raise SystemExit("network namespaces need root and iproute2")
    folder, network = Path(tempfile.mkdtemp()), Network(os.getpid() % 100_000, 2, True)
    network.make()
    try:
        result = measure(network, folder, chosen.steps, chosen.rounds)
    finally:
        network.remove()
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def measure(network: Network, folder: Path, steps: int, rounds: int) -> dict[str, object]:
    carried = {kind: list[dict[int, float]]() for kind in ("links", "gloo")}
    for _ in range(rounds):
        for kind, found in carried.items():
            found.append(all_reduce(network, kind, folder))
    best = {kind: {size: min(each[size] for each in found) for size in found[0]} for kind, found in carried.items()}
    for size, seconds in best["links"].items():
        ratio = best["gloo"][size] / seconds
        print(f"{size:>10,} bytes: links {1e3 * seconds:.2f} ms, gloo {1e3 * best['gloo'][size]:.2f} ms, {ratio:.2f} x")
    hosts, nodes = Hosts(network, [1, 1], folder), RayNodes(network, folder)
    try:
        nodes.start()
        return {"all_reduce": best, **train(network, hosts, nodes, steps, rounds)}
    finally:
        nodes.close()


def train(network: Network, hosts: Hosts, nodes: RayNodes, steps: int, rounds: int) -> dict[str, object]:
    ray = partial(by_ray, nodes, hosts)
    launches: dict[str, Launch] = {"connect": partial(by_connect, hosts), "Ray": ray}
    starts = {name: min(seconds_to_start(launch) for _ in range(2)) for name, launch in launches.items()}
    print("start: " + ", ".join(f"{seconds:.1f} s by {name}" for name, seconds in starts.items()))
    one, two, crossed = list[float](), list[float](), 0
    for _ in range(rounds):
        losses, seconds = losses_and_seconds(train_on_one(steps, hosts.folder))
        one.append(seconds)
        before = network.crossed(1)
        text = ray(example(steps, hosts.folder))
        theirs, seconds = losses_and_seconds(text)
        two.append(seconds)
        crossed = (network.crossed(1) - before) // steps
        if losses != theirs:
            raise SystemExit(f"losses differ: {losses[-1]} on one host, {theirs[-1]} on two")
        print(f"loss {losses[-1]} on both, {crossed / 1e6:.0f} MB over the network in a step")
        print(f"two hosts: {''.join(HELD_OUT.findall(text))}")
    print(f"step: one host {min(one):.3f} s, two {min(two):.3f} s, {min(two) / min(one):.2f} x")
    return {"starts": starts, "one": one, "two": two, "bytes": crossed}


if __name__ == "__main__":
    main()
