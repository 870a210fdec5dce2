"""A process that asks Ray for nodes and runs an agent on each: the driver of one job, until its standard input ends.

Reads what is wanted, answers once it is connected and with the address of each host's node, reads the commands of the
agents, and answers with the host and the words of each that fails: a line of JSON each. Other errors are its last words
on standard error.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import ray
from ray import util
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from moaic.text.units import count

_ray: Final[Any] = ray
_util: Final[Any] = util
"""Ray's own annotations are of parts."""

CONNECT_SECONDS: Final = 5.0

POLL_SECONDS: Final = 0.2

END_SECONDS: Final = 1.0
"""Time that agents have to end after the program has."""

SLIVER: Final = 0.001
"""Of a node's own resource: enough to be placed there and nowhere else."""


def main() -> None:
    answers = os.dup(1)
    # Ray writes there, too.
    os.dup2(2, 1)
    wanted: dict[str, Any] = json.loads(sys.stdin.readline())
    connect()
    answer(answers, "connected")
    hosts: list[dict[str, Any]] = wanted["hosts"]
    group, addresses = place(hosts, wanted["seconds"])
    answer(answers, addresses)
    if line := sys.stdin.readline():
        watch(start(group, hosts, json.loads(line)), answers)


def connect() -> None:
    """Become a driver of the cluster that RAY_ADDRESS names, or else of the one that this host belongs to."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address == "local":
        sys.exit("RAY_ADDRESS is `local`, which starts a Ray of one node: give the head's address and port")
    try:
        host, _, port = address.rpartition(":")
        if port.isdecimal():
            # Ray itself tries for a minute.
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    except OSError as error:
        where = f"at {address}, which RAY_ADDRESS names" if address else "on this host"
        sys.exit(f"no cluster answers {where}: {error.strerror or error}")


def answer(descriptor: int, value: Any) -> None:
    os.write(descriptor, f"{json.dumps(value)}\n".encode())


def place(hosts: Sequence[dict[str, Any]], seconds: float) -> tuple[PlacementGroup, list[str]]:
    """A group with a bundle on a node of its own for each host, and the addresses of these nodes.

    The first bundle keeps the others off this node. It has no cores: who has started the program has these already.
    """
    here = _util.get_node_ip_address()
    bundles: list[dict[str, float]] = [{f"node:{here}": SLIVER}]
    others = {node["NodeManagerAddress"] for node in _ray.nodes() if node["Alive"]} - {here}
    for host in hosts:
        if host["address"] and host["address"] not in others:
            sys.exit(f"no node but this one has the address {host['address']} of `{host['name']}`. Ray has {seen()}")
        on_one = {f"node:{host['address']}": SLIVER} if host["address"] else {}
        bundles.append({**host["needs"], **on_one})
    group = placement_group(bundles, strategy="STRICT_SPREAD")
    if not group.wait(seconds):
        wishes = ", ".join(f"`{host['name']}` ({in_words(host['needs'])})" for host in hosts)
        sys.exit(f"no free nodes, apart from this one, for {wishes}. Ray has {seen()}")
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in _ray.nodes()}
    found: dict[int, str] = _util.placement_group_table(group)["bundles_to_node_id"]
    return group, [nodes[found[index]] for index in range(1, len(bundles))]


def in_words(resources: Mapping[str, float]) -> str:
    """Cores and GPUs: `8 CPUs, 1 GPU`."""
    return ", ".join(count(int(resources.get(kind, 0)), kind) for kind in ("CPU", "GPU") if kind in resources)


def seen() -> str:
    """The nodes with their cores and GPUs, in words."""
    nodes = [node for node in _ray.nodes() if node["Alive"]]
    return ", ".join(f"{node['NodeManagerAddress']} ({in_words({'CPU': 0, **node['Resources']})})" for node in nodes)


def start(group: PlacementGroup, hosts: Sequence[dict[str, Any]], agents: Sequence[Sequence[str]]) -> dict[Any, str]:
    """A task for each host that runs its agent; the names of the hosts by task."""
    started: dict[Any, str] = {}
    for index, (host, (program, arguments, secret)) in enumerate(zip(hosts, agents, strict=True)):
        bundle = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index + 1)
        needs = {"num_cpus": host["needs"]["CPU"], "num_gpus": host["needs"].get("GPU", 0)}
        task = ray.remote(run_agent).options(**needs, max_retries=0, scheduling_strategy=bundle)
        started[task.remote(program, arguments, secret)] = host["name"]
    return started


def run_agent(program: str, arguments: str, secret: str) -> tuple[int, str]:
    """On a node: run an agent until it ends, or Ray ends this task; its exit code, and what it has said."""
    import ctypes
    import shlex
    import signal
    import subprocess
    import sys

    def end_with_task() -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG

    program = program or f"{shlex.quote(sys.executable)} -m moaic"
    done = subprocess.run(
        ["/bin/sh", "-c", f"exec {program} {arguments}"],
        check=False,
        input=f"{secret}\n",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=end_with_task,
    )
    return done.returncode, done.stderr


def watch(agents: dict[Any, str], answers: int) -> None:
    """Wait until the program or all agents have ended, and answer with the host and the words of each that fails."""
    end = None
    while agents and (end is None or time.monotonic() < end):
        done, _ = _ray.wait(list(agents), timeout=POLL_SECONDS)
        for each in done:
            code, said = _ray.get(each)
            host = agents.pop(each)
            if code and end is None:
                answer(answers, [host, said.strip() or f"exit code {code}"])
        if end is None and select.select([0], [], [], 0)[0]:
            end = time.monotonic() + END_SECONDS


if __name__ == "__main__":
    main()
