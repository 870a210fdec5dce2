"""`launcher = "slurm"`: a step of the program's own allocation runs an agent on each of its other nodes."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from shlex import quote
from typing import Final

from moaic.ir.errors import Diagnostic
from moaic.runtime.host.cluster_settings import ClusterSettings
from moaic.runtime.host.flavors import HostShare
from moaic.runtime.launch.enrolment import new_token
from moaic.runtime.launch.launchers.launcher import Invitation, Say
from moaic.runtime.launch.launchers.munge import munge_of
from moaic.runtime.launch.launchers.processes import Processes, write_line
from moaic.text.units import count

STEP: Final = ("--overlap", "--mem=0", "--cpu-bind=none", "--ntasks-per-node=1", "--mpi=none", "--export=ALL")
"""Each task has all that the job has of its node, which it shares with other steps."""

NOISE: Final = "lacks support for cpu binding"
"""Of a line that srun writes where there is nothing to bind."""

KEPT: Final = ("SLURM_CONF", "SLURM_SACK", "SLURM_JWT")
"""Beginnings of the names of variables by which srun reaches Slurm. The others are options of the job's steps, such as
SLURM_CPUS_PER_TASK, and would be those of this one."""

ASK_SECONDS: Final = 10.0

NODE: Final = re.compile(r"NodeName=(\S+) .*?\bNodeAddr=(\S+)")

OUTSIDE: Final = "start it by sbatch, or by `salloc --nodes=2 srun --nodes=1 --ntasks=1 --pty python train.py`"


class Slurm:
    """One srun for all hosts, which take the names of their nodes: Slurm starts its tasks by a tree of nodes."""

    name = "srun"

    def __init__(self, settings: ClusterSettings, environment: Mapping[str, str], say: Say) -> None:
        self._environment = {name: value for name, value in environment.items() if _is_passed_on(name)}
        self._job = environment.get("SLURM_JOB_ID", "")
        self._nodes = environment.get("SLURM_JOB_NODELIST", "")
        self._here = environment.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]
        _check(environment)
        self._program = settings.command or f"{quote(sys.executable)} -m moaic"
        self._processes = Processes(self.name)
        self._hosts: list[str] = []
        self._say = say

    def place(self, shares: Sequence[HostShare], seconds: float) -> tuple[HostShare, ...]:
        self._hosts = nodes_of(shares, self._other_nodes(shares, seconds))
        wished = [
            node if share.address == share.name else share.address
            for share, node in zip(shares, self._hosts, strict=True)
        ]
        found = self._addresses([each for each in wished if each in self._hosts and not _resolves(each)], seconds)
        return tuple(
            share._replace(name=node, address=found.get(address, address))
            for share, node, address in zip(shares, self._hosts, wished, strict=True)
        )

    def secrets(self, hosts: Sequence[str]) -> dict[str, str]:
        return dict.fromkeys(hosts, new_token())

    def start(self, shares: Sequence[HostShare], invitation: Invitation) -> None:
        # Those whose addresses were found.
        self._hosts = [share.name for share in shares]
        if not shares:
            return
        nodes = len(shares)
        where = [f"--jobid={self._job}", f"--nodes={nodes}", f"--ntasks={nodes}", f"--nodelist={','.join(self._hosts)}"]
        # The program listens already: an agent that finds nobody there has come too late.
        agent = f'exec {self._program} {invitation.connect} --host "$SLURMD_NODENAME" --wait 0'
        secret = invitation.secrets[self._hosts[0]]
        munge = munge_of(self._ask(ASK_SECONDS, "show", "config"))
        if munge is None:
            self._say("Slurm sends the secret of the agents unencrypted: whoever reads its network now can be one.")
        else:
            agent, secret = f"{munge.unseal} | {agent}", munge.seal(secret)
        command = ["srun", *where, *STEP, "--quiet", "/bin/sh", "-c", agent]
        process = self._processes.start(self.name, command, environment=self._environment)
        write_line(process, secret)

    def failed(self) -> Mapping[str, str]:
        """Those of whose tasks srun says that they have failed; once it has ended, all."""
        if not self._hosts:
            return {}
        words = "\n".join(line for line in self._processes.said(self.name).splitlines() if NOISE not in line)
        ended = self._processes.ended().get(self.name)
        hosts = [host for host in self._hosts if ended is not None or f"error: {host}: task" in words]
        return dict.fromkeys(hosts, words or ended or "")

    def advice(self, host: str, invitation: Invitation) -> str:
        return (
            f"look at that node by `scontrol show node {host}`, at other steps by `squeue --steps --jobs={self._job}`, "
            "and at its firewall"
        )

    def end(self, seconds: float) -> None:
        self._processes.end(seconds)

    def _other_nodes(self, shares: Sequence[HostShare], seconds: float) -> list[str]:
        """The nodes of the allocation except this one, at least as many as hosts. Raises Diagnostic."""
        nodes = self._ask(seconds, "show", "hostnames", self._nodes).split()
        if self._here not in nodes:
            raise Diagnostic(
                f"this program runs on `{self._here}`, which is no node of its allocation: {', '.join(nodes)}",
                hint=OUTSIDE,
            )
        nodes.remove(self._here)
        if len(nodes) < len(shares):
            wanted = ", ".join(f"`{share.name}`" for share in shares)
            found = f"{count(len(nodes), 'other node')}: {', '.join(nodes)}" if nodes else "no other node"
            raise Diagnostic(
                f"the flavor needs {count(len(shares), 'other host')} ({wanted}), and the allocation has {found}",
                hint=f"ask for them by --nodes={len(shares) + 1}, or choose a smaller flavor",
            )
        return nodes

    def _addresses(self, nodes: Sequence[str], seconds: float) -> dict[str, str]:
        """The addresses by which Slurm itself reaches nodes."""
        if not nodes:
            return {}
        return dict(NODE.findall(self._ask(seconds, "show", "node", "--oneliner", ",".join(nodes))))

    def _ask(self, seconds: float, *words: str) -> str:
        """What scontrol answers. Raises Diagnostic."""
        try:
            done = subprocess.run(
                ["scontrol", *words],
                capture_output=True,
                check=False,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                text=True,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            raise Diagnostic(f"scontrol {words[1]} has not answered within {seconds:g} s") from None
        if done.returncode:
            raise Diagnostic(f"scontrol {words[1]}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout


def nodes_of(shares: Sequence[HostShare], nodes: Sequence[str]) -> list[str]:
    """The node of each host: the one of its name, else the next that no host names."""
    named = {share.name for share in shares}
    free = iter([node for node in nodes if node not in named])
    return [share.name if share.name in nodes else next(free) for share in shares]


def _check(environment: Mapping[str, str]) -> None:
    """Raises Diagnostic for a program that runs in no allocation, or several times in it."""
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST"):
        if not environment.get(name):
            raise Diagnostic(
                f'launcher = "slurm" needs an allocation, and this program runs in none: {name} is not set',
                hint=OUTSIDE,
            )
    if (times := environment.get("SLURM_STEP_NUM_TASKS", "1")) != "1":
        raise Diagnostic(
            f"srun has started this program {times} times, and it has to run once",
            hint="leave srun out in a script of sbatch, or give it --nodes=1 --ntasks=1",
        )
    for command in ("srun", "scontrol"):
        if shutil.which(command, path=environment.get("PATH")) is None:
            raise Diagnostic(
                f'launcher = "slurm" needs {command}, which is not in PATH', hint="install the client of Slurm"
            )


def _is_passed_on(name: str) -> bool:
    """Whether a variable of the program is one of srun and of the agents, too; they get another secret."""
    return name != "MOAI_TOKEN" and (name.startswith(KEPT) or not name.startswith(("SLURM_", "SRUN_")))


def _resolves(node: str) -> bool:
    """Whether the name of a node leads to an address."""
    try:
        return bool(socket.getaddrinfo(node, None, type=socket.SOCK_STREAM))
    except OSError:
        return False
