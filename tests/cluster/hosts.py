"""Hosts for tests: network namespaces on a bridge of their own, each with an agent; the test's program runs in one."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PORT = 4711

HERE = "localhost"


def may_make_namespaces() -> bool:
    """Whether this process may make network namespaces: it needs root and iproute2."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"moaic-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], check=False)
    return made


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def on_cores(first: int, count: int) -> list[str]:
    """The beginning of a command that runs on some cores of this machine."""
    cores = sorted(os.sched_getaffinity(0))
    chosen = [cores[(first + index) % len(cores)] for index in range(min(count, len(cores)))]
    return ["taskset", "--cpu-list", ",".join(map(str, chosen))]


@dataclass
class Network:
    """Namespaces `0` to `n - 1`, at 10.77.x.1 and so on; without root all hosts are addresses of this one."""

    number: int
    """Of this network, so that several can exist."""
    count: int
    has_namespaces: bool

    def name(self, host: int) -> str:
        return f"moaic{self.number}h{host}"

    def address(self, host: int) -> str:
        high, low = divmod(self.number % 65_536, 256)
        return f"10.77.{low}.{host + 1}" if self.has_namespaces else f"127.{high}.{low}.{host + 1}"

    def make(self) -> None:
        if not self.has_namespaces:
            return
        bridge = f"mb{self.number}"
        ip("link", "add", bridge, "type", "bridge")
        ip("link", "set", bridge, "up")
        for host in range(self.count):
            name, inner, outer = self.name(host), self.interface(host), f"mo{self.number}-{host}"
            ip("netns", "add", name)
            ip("link", "add", outer, "type", "veth", "peer", "name", inner)
            ip("link", "set", inner, "netns", name)
            ip("link", "set", outer, "master", bridge, "up")
            ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", inner)
            ip("-n", name, "link", "set", inner, "up")
            ip("-n", name, "link", "set", "lo", "up")

    def remove(self) -> None:
        if not self.has_namespaces:
            return
        for host in range(self.count):
            # A namespace lives on while processes in it end; its end of the link goes with the other one.
            subprocess.run(["ip", "link", "del", f"mo{self.number}-{host}"], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "del", self.name(host)], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", f"mb{self.number}"], check=False, capture_output=True)

    def interface(self, host: int) -> str:
        """The name of a host's end of its link."""
        return f"mi{self.number}-{host}"

    def crossed(self, host: int) -> int:
        """Bytes that a host has sent and received."""
        counts = Path(f"/sys/class/net/mo{self.number}-{host}/statistics")
        return sum(int((counts / name).read_text(encoding="ascii")) for name in ("rx_bytes", "tx_bytes"))

    def cut(self, host: int) -> None:
        """Take a host off the network: nothing says that it is gone."""
        ip("link", "set", f"mo{self.number}-{host}", "down")

    def processes(self, host: int) -> set[int]:
        """The processes in a host's namespace."""
        found = subprocess.run(["ip", "netns", "pids", self.name(host)], capture_output=True, text=True, check=False)
        return set(map(int, found.stdout.split()))

    def kill_all(self, host: int) -> None:
        """Kill all that runs in a host's namespace."""
        for process in self.processes(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def inside(self, host: int, command: Sequence[str]) -> list[str]:
        """The command on a host, which has one core: the number of threads of a worker changes last bits."""
        where = ["ip", "netns", "exec", self.name(host)] if self.has_namespaces else []
        return [*where, *on_cores(host, 1), *command]


@dataclass
class Hosts:
    """A cluster whose first host is that of the program."""

    network: Network
    workers: Sequence[int]
    """Of each host."""
    folder: Path
    secret: str = field(default_factory=lambda: secrets.token_hex(32))
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])

    def write(self, **settings: object) -> None:
        """Write `cluster.toml`."""
        values = {"launcher": "connect", "listen": self.network.address(0), "port": PORT, "wait": 60, **settings}
        lines = ["[cluster]", *(f"{key} = {_toml(value)}" for key, value in values.items())]
        for host, workers in enumerate(self.workers):
            name = f"node{host}" if host else HERE
            lines += ["[[host]]", f'name = "{name}"', f'address = "{self.network.address(host)}"']
            lines += [f"workers = {workers}", 'memory = "2GB"']
        path = self.folder / "config/moai/cluster.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def environment(self, **more: str) -> dict[str, str]:
        """That of the program."""
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "XDG_CONFIG_HOME": str(self.folder / "config"),
            "MOAI_FLAVOR": str(sum(self.workers)),
            "MOAI_TOKEN": self.secret,
            "MOAI_COMPILE": "0",
            **more,
        }

    def start_agent(self, host: int, *words: str, **more: str) -> subprocess.Popen[bytes]:
        """Start the agent of a host, with a home of its own."""
        home = self.folder / f"home{host}"
        home.mkdir(exist_ok=True)
        where = f"{self.network.address(0)}:{PORT}"
        command = [sys.executable, "-m", "moaic", "agent", "--connect", where, "--host", f"node{host}", *words]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "MOAI_TOKEN": self.secret, "HOME": str(home), **more}
        with self._said(host).open("a", encoding="utf-8") as errors:
            agent = subprocess.Popen(
                self.network.inside(host, command),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                cwd=home,
            )
        self.agents.append(agent)
        return agent

    def said(self, host: int) -> str:
        """What the agent of a host has said."""
        return self._said(host).read_text(encoding="utf-8")

    def _said(self, host: int) -> Path:
        return self.folder / f"agent{host}.txt"

    def start_agents(self) -> None:
        for host in range(1, len(self.workers)):
            self.start_agent(host)

    def start(self, command: Sequence[str], **more: str) -> subprocess.Popen[str]:
        """Start a program on the first host."""
        return subprocess.Popen(
            self.network.inside(0, [sys.executable, *command]),
            env=self.environment(**more),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
        )

    def run(self, command: Sequence[str], seconds: float = 120, **more: str) -> tuple[int, str]:
        """Run a program on the first host, and the agents of the others; its exit code and what it printed."""
        self.start_agents()
        return self.finish(command, seconds, **more)

    def finish(self, command: Sequence[str], seconds: float = 120, **more: str) -> tuple[int, str]:
        """Run a program on the first host; its exit code and what it printed."""
        program = self.start(command, **more)
        try:
            out, _ = program.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            program.kill()
            out, _ = program.communicate()
            raise AssertionError(f"no end within {seconds} s:\n{out}") from None
        return program.returncode, out

    def end(self) -> list[int]:
        """Wait for the agents, which end by themselves; their exit codes."""
        codes = [agent.wait(20) for agent in self.agents]
        self.agents.clear()
        return codes

    def close(self) -> None:
        """Kill what is left of the agents."""
        for agent in self.agents:
            agent.kill()
            agent.wait()


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()
