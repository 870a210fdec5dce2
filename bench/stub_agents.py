"""What many hosts cost the controller: a Llama trained on stub agents, which answer over TLS and compute nothing.

The script, the plan, the controller and the start of the cluster are those of a user; `stub_hosts.py` is all hosts, on
the loopback. A case `128x8` is 128 other hosts with 8 workers each; this host has one stub worker, too. Prints for each
case the seconds from the start until all workers have greeted, the program texts, and the CPU time of this process: of
the start, of sending the texts, and of a step. `--profile` prints where the time of steps goes.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from stub_hosts import FIRST_LINE
from transformers import LlamaConfig, LlamaForCausalLM

from moaic.compile import planning
from moaic.ir.parser import parse
from moaic.passes.perf.machine import Machine
from moaic.predict.named_clusters import named_cluster
from moaic.runtime.controller import launch
from moaic.runtime.controller.accelerator import Accelerator
from moaic.runtime.controller.session import accelerator
from moaic.runtime.host.status import Status
from moaic.runtime.launch import hosts
from moaic.runtime.launch.local_workers import ForkServer, LocalShare, LocalWorker, LocalWorkers
from moaic.runtime.protocol.block_checks import check_answer
from moaic.runtime.protocol.carrier import Carrier
from moaic.runtime.protocol.frames import BlockMemory, Connection
from moaic.runtime.protocol.shared_memory import create_memory

CASES: Final = ("0x0", "16x8", "128x1", "128x8")

SEQUENCE: Final = 16

WARM_UP: Final = 5

WIDTH: Final = 11
"""Of a column."""

SCRIPT: Final = Path(__file__).with_name("stub_hosts.py")

Block = TypeVar("Block")


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one case; CPU time is of the controller's process."""

    workers: int
    start_s: float
    start_cpu_s: float
    text_bytes: int
    """Of the program texts."""
    load_bytes: int
    """Sent, to all workers together."""
    load_cpu_s: float
    step_cpu_ms: float
    read_cpu_ms: float
    """Of a step that also reads its loss."""
    wait_cpu_ms: float
    """Of a step that also waits for all workers."""
    step_bytes: int


def start_stub(
    count: int,
    blocks: BlockMemory[Block],
    environment: Mapping[str, str] | None = None,
    *,
    devices: Sequence[str] = (),
    carrier: object = None,
    share: LocalShare | None = None,
) -> LocalWorkers[Block]:
    """Instead of `local_workers.start`: the one worker of this host is a stub."""
    ranks = count if share is None else len(share.peers.addresses)
    here, there = socket.socketpair()
    reports, reporter = os.pipe()
    words = [sys.executable, str(SCRIPT), "--local", str(there.fileno())]
    process = subprocess.Popen(words, pass_fds=[there.fileno(), reporter], start_new_session=True)
    there.close()
    os.close(reporter)
    memory = create_memory(ranks)
    status = Status(memory, ranks)
    os.close(memory)
    worker = LocalWorker(0, Connection(here, blocks, check_answer))
    return LocalWorkers((worker,), ForkServer(process, reports), status, tuple(devices) or ("cpu",), Carrier.MEMORY)


def write_cluster(folder: Path, port: int, others: int, workers: int) -> None:
    """The user's `cluster.toml`."""
    lines = ["[cluster]", 'launcher = "connect"', 'listen = "127.0.0.1"', f"port = {port}"]
    for number in range(others + 1):
        name, count = (f"node{number}", workers) if number else ("localhost", 1)
        lines += ["[[host]]", f'name = "{name}"', 'address = "127.0.0.1"', f"workers = {count}", 'memory = "8GB"']
    file = folder / "moai/cluster.toml"
    file.parent.mkdir(parents=True)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start_agents(port: int, others: int) -> subprocess.Popen[str]:
    """The stub agents, once they wait for the controller."""
    words = [sys.executable, str(SCRIPT), "--connect", str(port), "--hosts", str(others)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == FIRST_LINE
    return process


def without_measurements(workers: int) -> None:
    """Plan for a cluster of the tables: measured rates of stubs would mean nothing."""
    machine = named_cluster("h100").machine(workers)

    def this_machine() -> Machine:
        return machine

    def idle_bytes() -> Mapping[str, int]:
        return {}

    def measured_kernels(expected: Mapping[str, float]) -> None:
        return None

    planning.this_machine, planning.idle_bytes = this_machine, idle_bytes
    planning.measured_kernels = measured_kernels


class Training:
    """The user's script: a small Llama, AdamW, and a batch of a row for each worker."""

    def __init__(self, workers: int) -> None:
        torch.manual_seed(0)
        sizes: dict[str, Any] = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
        }
        model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256, use_cache=False))
        torch.nn.Module.to(model, "moai")
        options: dict[str, Any] = {"dp": workers, "distribute_param": "none"} if workers > 1 else {}
        self._model: Any = torch.compile(model, backend="moai", options=options)
        self._optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        self._rows = torch.randint(0, 256, (workers, SEQUENCE))

    def step(self) -> torch.Tensor:
        ids = self._rows.to("moai")
        loss = self._model(input_ids=ids, labels=ids).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss

    def read(self) -> float:
        return self.step().item()

    def wait(self) -> None:
        self.step()
        torch.accelerator.synchronize()


def cpu_milliseconds(step: Callable[[], object], steps: int) -> float:
    """The CPU time of a step, as the lower quartile, since other programs on the same cores make steps slower.

    What is still in the sockets is not waited for.
    """
    found: list[float] = []
    for number in range(WARM_UP + steps):
        began = time.process_time()
        step()
        found.append(1000 * (time.process_time() - began))
        if number % 10 == 0:
            torch.accelerator.synchronize()
    return statistics.quantiles(found[WARM_UP:], n=4)[0]


def sent() -> int:
    return accelerator().stats().sent


def load_again(texts: Sequence[str]) -> tuple[int, float]:
    """Bytes and CPU seconds of sending the texts once more."""
    modules = [parse(text) for text in texts]
    before, began = sent(), time.process_time()
    for text, module in zip(texts, modules, strict=True):
        accelerator().load(text, compiled=False, module=module)
    seconds = time.process_time() - began
    return sent() - before, seconds


def measured(others: int, each: int, steps: int, profile: bool) -> Figures:
    workers = 1 + others * each
    texts: list[str] = []
    load = Accelerator.load

    def noted(self: Accelerator, text: str, **options: Any) -> int:
        texts.append(text)
        return load(self, text, **options)

    Accelerator.load = noted
    without_measurements(workers)
    began, spent = time.monotonic(), time.process_time()
    accelerator().synchronize()
    start, start_cpu = time.monotonic() - began, time.process_time() - spent
    training = Training(workers)
    training.wait()
    load_bytes, load_cpu = load_again(list(texts))
    text_bytes = sum(map(len, texts)) // 2
    step_cpu = cpu_milliseconds(training.step, steps)
    before = sent()
    with cProfile.Profile() if profile else tempfile.TemporaryFile() as profiler:
        read_cpu = cpu_milliseconds(training.read, steps)
    step_bytes = (sent() - before) // (WARM_UP + steps)
    if isinstance(profiler, cProfile.Profile):
        pstats.Stats(profiler).sort_stats("tottime").print_stats(40)
    wait_cpu = cpu_milliseconds(training.wait, steps)
    return Figures(
        workers, start, start_cpu, text_bytes, load_bytes, load_cpu, step_cpu, read_cpu, wait_cpu, step_bytes
    )


def run_case(case: str, steps: int, profile: bool) -> Figures:
    others, each = map(int, case.split("x"))
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        write_cluster(Path(folder), port, others, each)
        os.environ |= {"XDG_CONFIG_HOME": folder, "MOAI_FLAVOR": str(1 + others * each), "MOAI_CACHE": "off"}
        os.environ |= {"MOAI_COMPILE": "0", "MOAI_TOKEN": secrets.token_hex(32)}
        hosts.start = launch.start = start_stub
        agents = start_agents(port, others) if others else None
        try:
            return measured(others, each, steps, profile)
        finally:
            if agents is not None:
                agents.kill()
                agents.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--case", help="measure one, in this process")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--profile", action="store_true")
    chosen = parser.parse_args()
    if chosen.case:
        print(json.dumps(asdict(run_case(chosen.case, chosen.steps, chosen.profile))))
        return
    for number, case in enumerate(chosen.cases):
        words = [sys.executable, __file__, "--case", case, "--steps", str(chosen.steps)]
        out = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
        found = json.loads(out.splitlines()[-1])
        if number == 0:
            print("case".ljust(WIDTH), *(name.rjust(WIDTH) for name in found))
        print(case.ljust(WIDTH), *(f"{round(value, 3):,}".rjust(WIDTH) for value in found.values()), flush=True)


if __name__ == "__main__":
    main()
