"""Two hosts beside one: the demo's Llama on two workers, and 64 MiB added up beside gloo. Needs root and iproute2.

The hosts are network namespaces of this machine with a core each; one host has both cores. Runs alternate. Prints the
losses, seconds of a step, what crossed the network, and the ratios.
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
import time
from pathlib import Path

from moaic.runtime.launch.identity import Authority
from moaic.runtime.launch.local_workers import KEEP_MEMORY
from moaic.runtime.protocol.frames import encode
from moaic.runtime.protocol.peers import PeerAddress, Peers
from tests.cluster.hosts import ROOT, Hosts, Network, may_make_namespaces, on_cores

STEP = re.compile(r"^step +\d+ +loss +([0-9.]+) +([0-9.]+) s", re.MULTILINE)

UNSTEADY = 12
"""First steps, among them those that run op by op or wait for a measurement."""


def train_over_hosts(hosts: Hosts, steps: int) -> str:
    began = time.monotonic()
    code, text = hosts.run(example(steps), 600, MOAI_COMPILE="wait", MOAI_LOG="info")
    if code:
        raise SystemExit(text)
    hosts.end()
    print(f"two hosts: {time.monotonic() - began:.1f} s in all")
    return text


def train_on_one(steps: int, folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MOAI_FLAVOR": "2", "MOAI_COMPILE": "wait"}
    environment["XDG_CONFIG_HOME"] = str(folder / "none")
    command = [*on_cores(0, 2), sys.executable, *example(steps)]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, cwd=folder).stdout


def example(steps: int) -> list[str]:
    return [str(ROOT / "examples/train_llama2.py"), "--device", "moai", "--steps", str(steps)]


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
    hosts = Hosts(network, [1, 1], folder)
    hosts.write()
    one, two, crossed = list[float](), list[float](), 0
    for _ in range(rounds):
        losses, seconds = losses_and_seconds(train_on_one(steps, folder))
        one.append(seconds)
        before = network.crossed(1)
        theirs, seconds = losses_and_seconds(train_over_hosts(hosts, steps))
        two.append(seconds)
        crossed = (network.crossed(1) - before) // steps
        if losses != theirs:
            raise SystemExit(f"losses differ: {losses[-1]} on one host, {theirs[-1]} on two")
        print(f"loss {losses[-1]} on both, {crossed / 1e6:.0f} MB over the network in a step")
    print(f"step: one host {min(one):.3f} s, two {min(two):.3f} s, {min(two) / min(one):.2f} x")
    return {"all_reduce": best, "one": one, "two": two, "bytes": crossed}


if __name__ == "__main__":
    main()
