"""Slurm for tests: its controller and a daemon for each node, in network namespaces with host names of their own."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.hosts import ROOT, Network

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "salloc", "sbatch", "scontrol", "squeue")

SECONDS = 60.0


def has_slurm() -> bool:
    return all(map(shutil.which, PROGRAMS))


def wait_until(happens: Callable[[], object], what: str, seconds: float = SECONDS) -> None:
    until = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < until, f"{what} has not happened within {seconds:g} s"
        time.sleep(0.1)


@dataclass
class SlurmCluster:
    """Nodes `n0`, `n1` and so on, one core each; jobs start on `n0`."""

    network: Network
    folder: Path
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])
    idle: dict[int, set[int]] = field(default_factory=dict[int, set[int]])
    """The processes of each node without a job."""

    def start(self) -> None:
        self._configure()
        self.network.make()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(64))
        key.chmod(0o400)
        files = {"key-file": key, "socket": self._socket}
        files |= {f"{name}-file": self.folder / f"munge.{name}" for name in ("pid", "log", "seed")}
        self._daemon(["munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in files.items())])
        wait_until(self._socket.exists, "the start of munged")
        self._daemon(self.on(0, ["slurmctld", "-D", "-c"]))
        for node in range(self.network.count):
            self._daemon(self.on(node, ["slurmd", "-D"]))
        wait_until(lambda: self.ask("sinfo", "-h", "-o", "%t:%D") == f"idle:{self.network.count}", "the start of Slurm")
        self.idle = {node: self.network.processes(node) for node in range(self.network.count)}

    def close(self) -> None:
        """End Slurm, and what a failed test has left on its nodes."""
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for node in range(self.network.count):
            self.network.kill_all(node)
        self.network.remove()

    def on(self, node: int, command: Sequence[str]) -> list[str]:
        """The command on a node, which has the host name of that node."""
        named = ["unshare", "--uts", "sh", "-c", f'hostname n{node} && exec "$@"', "sh", *command]
        return self.network.inside(node, named)

    def ask(self, *command: str) -> str:
        """What a command of Slurm answers on the first node."""
        done = subprocess.run(
            self.on(0, command), env=self.environment(), capture_output=True, check=False, text=True, timeout=SECONDS
        )
        return done.stdout.strip()

    def start_job(self, command: Sequence[str], **more: str) -> subprocess.Popen[str]:
        """Start a command on the first node."""
        return subprocess.Popen(
            self.on(0, command),
            env=self.environment(**more),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
        )

    def run(self, command: Sequence[str], **more: str) -> tuple[int, str]:
        """Run a command on the first node; its exit code and what it printed."""
        job = self.start_job(command, **more)
        out, _ = job.communicate(timeout=60)
        return job.returncode, out

    def program(self, text: str) -> str:
        """The command line of a program."""
        file = self.folder / "program.py"
        file.write_text(text, encoding="utf-8")
        return f"{sys.executable} {file}"

    def environment(self, **more: str) -> dict[str, str]:
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MOAI_"))}
        return {
            **ours,
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PYTHONPATH": str(ROOT),
            "XDG_CONFIG_HOME": str(self.folder / "config"),
            "MOAI_COMPILE": "0",
            **more,
        }

    def wait_until_idle(self, *nodes: int) -> None:
        """Wait until no process of a job is left on nodes."""
        wait_until(
            lambda: all(self.network.processes(node) <= self.idle[node] for node in nodes), "the end of all processes"
        )

    @property
    def _socket(self) -> Path:
        return self.folder / "munge.socket"

    def _daemon(self, command: Sequence[str]) -> None:
        with (self.folder / "daemons.txt").open("ab") as said:
            daemon = subprocess.Popen(
                command, env=self.environment(), stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )
        self.daemons.append(daemon)

    def _configure(self) -> None:
        """Write the files of Slurm's configuration."""
        state = self.folder / "state"
        state.mkdir()
        first, last = self.network.address(0), self.network.count - 1
        addresses = f"{first.rpartition('.')[0]}.[1-{last + 1}]"
        lines = [
            *("ClusterName=tests", f"SlurmctldHost=n0({first})", "SlurmUser=root", "MailProg=/bin/true"),
            *("AuthType=auth/munge", "CredType=cred/munge", f"AuthInfo=socket={self._socket}", "MpiDefault=none"),
            *(f"StateSaveLocation={state}", f"SlurmdSpoolDir={state}/%n", f"SlurmdPidFile={state}/%n.pid"),
            *(f"SlurmctldPidFile={state}/slurmctld.pid", "SlurmdParameters=config_overrides", "KillWait=5"),
            *("ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "SwitchType=switch/none"),
            *("SelectType=select/cons_tres", "SelectTypeParameters=CR_Core_Memory"),
            "SchedulerParameters=batch_sched_delay=0,sched_min_interval=0",
            f"NodeName=n[0-{last}] NodeAddr={addresses} CPUs=2 RealMemory=4000",
            "PartitionName=all Nodes=ALL Default=YES MaxTime=5",
        ]
        (self.folder / "slurm.conf").write_text("\n".join(lines) + "\n", encoding="utf-8")
        # `ip netns exec` mounts a /sys without control groups: Slurm finds no version to choose.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n", encoding="utf-8")
