"""moaic beside other systems, in the same minutes on the same machine.

Every peer trains the example's model in processes of its own (bench/train_once.py). First each starts once with empty
caches: launch to the end of the first step, and the peak memory of the steps after it. Then rounds, in each of which
every peer runs in turn, so that what the machine does meanwhile falls on all of them alike; figures are medians over
all steps of all rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TextIO

import torch

ROOT = Path(__file__).parent.parent
BATCH, LENGTH = 8, 256
WARM_UP = 2
"""Steps at the start of every run that are left out of its speed."""

Figures = Mapping[str, Mapping[str, float]]
"""What was measured, by peer and name of the figure."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A way of training with the two cores of this machine shared out."""

    way: str
    processes: int
    threads: int
    plan: str = ""
    """MOAI_PLAN; empty for the plan that moaic selects."""


PEERS: Mapping[str, Peer] = {
    "moai": Peer("moai", 1, 0),
    "moai distributed": Peer("moai", 1, 0, "dp=2,distribute_param=use"),
    "inductor": Peer("inductor", 1, 2),
    "ddp + inductor": Peer("ddp", 2, 1),
    "eager": Peer("eager", 1, 2),
    "fsdp2 + inductor": Peer("fsdp2", 2, 1),
}


MODEL_PARALLEL: Mapping[str, Peer] = {
    "moai pp 1f1b": Peer("moai", 1, 0, "pp=2,micro_batches=8,schedule=1f1b"),
    "moai pp gpipe": Peer("moai", 1, 0, "pp=2,micro_batches=8,schedule=gpipe"),
    "moai pp interleaved": Peer("moai", 1, 0, "pp=2,micro_batches=8,schedule=interleaved"),
    "moai pp zero-bubble": Peer("moai", 1, 0, "pp=2,micro_batches=8,schedule=zero-bubble"),
    "moai tp": Peer("moai", 1, 0, "tp=2,dp=1,pp=1,micro_batches=1"),
    "torch 1f1b": Peer("pipeline", 2, 1),
    "torch 1f1b compiled": Peer("pipeline_compiled", 2, 1),
    "dtensor tp": Peer("dtensor", 2, 1),
    "dtensor tp compiled": Peer("dtensor_compiled", 2, 1),
}
"""Plans that cut the model, and PyTorch's own ways of cutting it, with the same split and micro-batches."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is the same for all peers: the number type, the size of a run, and a folder for the data and the caches."""

    dtype: str
    layers: int
    steps: int
    folder: Path
    options: tuple[str, ...] = ()
    """More for train_once.py, such as another width."""
    data_limit: int = 0
    """Bytes of private memory that each process may have (RLIMIT_DATA); 0 for no limit."""


@dataclass(slots=True)
class Run:
    """One launch of a peer. `memory` is the largest sum of PSS seen after the first step, in bytes."""

    launched: float
    steps: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    memory: int = 0

    @property
    def first_step(self) -> float:
        """Seconds from launch to the end of the first step."""
        return self.steps[0]["clock"] - self.launched

    @property
    def durations(self) -> list[float]:
        return [step["seconds"] for step in self.steps[WARM_UP:]]


def write_data(folder: Path) -> None:
    """The batches that all peers train on, made once by the example's own code."""
    sys.path.insert(0, str(ROOT / "examples"))
    from train_llama2 import batches, load_tokenizer, source_files

    files = source_files()
    torch.save(batches(load_tokenizer(files), files, 16, BATCH, LENGTH, seed=0), folder / "data.pt")


def environment(peer: Peer, rank: int, caches: Path, *, steady: bool) -> dict[str, str]:
    """What a process of `peer` sees: its caches apart from everybody else's; moai shares the threads out itself."""
    variables = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "examples"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "XDG_CACHE_HOME": str(caches),
        "MOAI_LOG": "warning",
        "MOAI_FLAVOR": "2",
        "MOAI_COMPILE": "wait" if steady else "1",
        "MOAI_PLAN": peer.plan,
        "MOAI_DUMP": str(caches / "dump"),
    }
    if peer.threads:
        variables |= {"OMP_NUM_THREADS": str(peer.threads), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    if peer.processes > 1:
        variables |= {"RANK": str(rank), "WORLD_SIZE": str(peer.processes), "GLOO_SOCKET_IFNAME": "lo"}
    return variables


def launch(peer: Peer, setting: Setting, *, watch_memory: bool = False, steady: bool = False) -> Run:
    """Runs a peer to its end; with `steady` all steps run compiled. Raises RuntimeError with its words if it fails."""
    caches = setting.folder / "-".join((peer.way, peer.plan, setting.dtype))
    caches.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=setting.folder) as meeting:
        command = [sys.executable, str(ROOT / "bench" / "train_once.py"), peer.way, str(setting.folder / "data.pt")]
        command += ["--dtype", setting.dtype, "--layers", str(setting.layers), "--steps", str(setting.steps)]
        command += ["--rendezvous", f"{meeting}/store", *setting.options]
        if peer.way == "moai":
            command += ["--trace", str(caches / "trace.json")]
        complaints = Path(meeting) / "stderr"
        with complaints.open("w") as errors, ExitStack() as running:
            run = Run(time.time())
            processes = [
                running.enter_context(
                    start(command, environment(peer, rank, caches, steady=steady), errors, setting.data_limit)
                )
                for rank in range(peer.processes)
            ]
            follow(processes, run, watch_memory=watch_memory)
        if any(process.returncode for process in processes):
            raise RuntimeError(f"{peer.way} failed:\n{complaints.read_text()[-4000:]}")
    return run


def start(
    command: Sequence[str], variables: dict[str, str], errors: TextIO, data_limit: int = 0
) -> subprocess.Popen[str]:
    if data_limit:
        command = ["prlimit", f"--data={data_limit}", *command]
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT)


def follow(processes: Sequence[subprocess.Popen[str]], run: Run, *, watch_memory: bool) -> None:
    """Reads the steps of the first process as they come, and the memory of all after the first one."""
    over = threading.Event()
    watcher = threading.Thread(target=watch, args=([process.pid for process in processes], run, over))
    output = processes[0].stdout
    assert output is not None
    for line in output:
        run.steps.append(json.loads(line))
        if watch_memory and len(run.steps) == 1:
            watcher.start()
    over.set()
    if watcher.is_alive():
        watcher.join()


def watch(roots: Sequence[int], run: Run, over: threading.Event) -> None:
    while not over.wait(0.2):
        run.memory = max(run.memory, sum(proportional_bytes(process) for process in family(roots)))


def family(roots: Sequence[int]) -> set[int]:
    """`roots` and all their descendants."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found = set(roots)
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def proportional_bytes(process: int) -> int:
    """PSS of one process: its own pages, and its part of those that it shares. 0 once it has gone."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def compare(names: Sequence[str], setting: Setting, rounds: int, peers: Mapping[str, Peer] = PEERS) -> Figures:
    """Figures of each peer: tokens/s, median step, cold first step, peak memory, and losses to see that all trained."""
    write_data(setting.folder)
    cold = {name: launch(peers[name], setting, watch_memory=True) for name in names}
    runs = {name: list[Run]() for name in names}
    for _ in range(rounds):
        for name in names:
            runs[name].append(launch(peers[name], setting, steady=True))
    return {name: figures(cold[name], runs[name]) for name in names}


def figures(cold: Run, runs: Sequence[Run]) -> dict[str, float]:
    step = median(seconds for run in runs or [cold] for seconds in run.durations)
    return {
        "tokens_per_second": BATCH * LENGTH / step,
        "step_s": step,
        "cold_first_step_s": cold.first_step,
        "warm_first_step_s": median(run.first_step for run in runs or [cold]),
        "peak_memory_gb": cold.memory / 1e9,
        "last_loss": cold.steps[-1]["loss"],
    }


def table(found: Figures) -> str:
    """A line per peer, fastest first."""
    lines = [f"{'':18}{'tokens/s':>10}{'step s':>9}{'cold s':>9}{'warm s':>9}{'PSS GB':>9}{'loss':>9}"]
    for name, row in sorted(found.items(), key=lambda item: -item[1]["tokens_per_second"]):
        cells = [f"{row['tokens_per_second']:>10,.0f}", f"{row['step_s']:>9.3f}", f"{row['cold_first_step_s']:>9.1f}"]
        cells += [f"{row['warm_first_step_s']:>9.1f}", f"{row['peak_memory_gb']:>9.2f}", f"{row['last_loss']:>9.4f}"]
        lines.append(f"{name:18}" + "".join(cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--peers", default=",".join(PEERS), help="names, separated by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=6)
    args: Any = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(args.dtype, args.layers, args.steps, Path(folder))
        print(table(compare(args.peers.split(","), setting, args.rounds)))


if __name__ == "__main__":
    main()
