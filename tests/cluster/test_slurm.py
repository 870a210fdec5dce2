"""Agents started by srun, in allocations of a real Slurm on nodes that are network namespaces."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest

from tests.cluster.conftest import has_namespaces
from tests.cluster.hosts import Network
from tests.cluster.slurm_cluster import SECONDS, SlurmCluster, has_slurm, wait_until

pytestmark = pytest.mark.skipif(not has_namespaces() or not has_slurm(), reason="needs root, namespaces and Slurm")

SUM = """
import torch
x = torch.arange(8.0).to("moai")
print("sum", (x * 2).sum().item())
from moaic.runtime.controller import session
print("hosts", session.accelerator().hosts)
"""

ENDLESS = f"""{SUM}
import os, time
print("process", os.getpid(), flush=True)
for _ in range(600):
    time.sleep(0.1)
    (x * 2).sum().item()
"""

SETTINGS = """
[cluster]
launcher = "slurm"

[[host]]
name = "localhost"
workers = 1
memory = "1GB"

[[host]]
name = "node"
count = 2
workers = 1
memory = "1GB"
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    folder = tmp_path_factory.mktemp("slurm")
    found = SlurmCluster(Network(os.getpid() % 100_000, 3, has_namespaces=True), folder)
    settings = folder / "config/moai/cluster.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text(SETTINGS, encoding="utf-8")
    try:
        found.start()
        yield found
    finally:
        found.close()


def test_a_batch_job_runs_on_all_its_nodes_and_leaves_nothing(slurm: SlurmCluster) -> None:
    file = slurm.folder / "summed.txt"
    batch = ["sbatch", "--nodes=3", "--ntasks-per-node=2", "--cpus-per-task=1", "--mem-per-cpu=500"]
    # The job's own options and an old secret do not reach the agents.
    more = {"MOAI_FLAVOR": "3", "MOAI_TOKEN": "x" * 40, "SLURM_EXACT": "1", "SLURM_CPUS_PER_TASK": "1"}
    slurm.run([*batch, f"--output={file}", f"--wrap={slurm.program(SUM)}"], **more)
    wait_until(lambda: not slurm.ask("squeue", "--noheader"), "the end of the job")
    out = file.read_text(encoding="utf-8")
    assert "sum 56.0" in out
    assert "hosts ('', 'n1', 'n2')" in out
    slurm.wait_until_idle(0, 1, 2)


def test_a_check_shows_the_hosts_as_the_nodes_that_they_are(slurm: SlurmCluster) -> None:
    check = [sys.executable, "-m", "moaic", "cluster", "check", "--folder", str(slurm.folder)]
    code, out = slurm.run(["salloc", "--quiet", "--nodes=3", *check])
    assert code == 0, out
    rows = [line.split()[:4] for line in out.splitlines() if line.startswith(("n1 ", "n2 "))]
    assert rows[:2] == [["n1", "yes", "same", "same"], ["n2", "yes", "same", "same"]], out
    assert "?" not in out
    assert out.endswith("A program can use all hosts.\n")
    slurm.wait_until_idle(1, 2)


def test_agents_end_with_a_program_that_is_killed(slurm: SlurmCluster) -> None:
    # The allocation outlives the program, until `cat` has read all.
    held = f"{slurm.program(ENDLESS)}; echo ended; cat"
    job = slurm.start_job(["salloc", "--quiet", "--nodes=3", "sh", "-c", held], MOAI_FLAVOR="2")
    assert job.stdout is not None
    process = int(next(line for line in job.stdout if line.startswith("process")).split()[1])
    assert slurm.ask("squeue", "--steps", "--noheader", "--format=%i %N").endswith(".0 n1")
    os.kill(process, signal.SIGKILL)
    assert any(line.startswith("ended") for line in job.stdout)
    wait_until(lambda: not slurm.ask("squeue", "--steps", "--noheader"), "the end of the step")
    slurm.wait_until_idle(1, 2)
    job.communicate(timeout=SECONDS)


def test_a_cancelled_job_ends_everywhere_with_one_message(slurm: SlurmCluster) -> None:
    file = slurm.folder / "cancelled.txt"
    batch = ["sbatch", "--parsable", "--nodes=2", f"--output={file}", f"--wrap={slurm.program(ENDLESS)}"]
    _, job = slurm.run(batch, MOAI_FLAVOR="2")
    wait_until(lambda: file.exists() and "process" in file.read_text(encoding="utf-8"), "the start of the program")
    slurm.ask("scancel", job.strip())
    slurm.wait_until_idle(0, 1, 2)
    out = file.read_text(encoding="utf-8").partition("process")[2]
    assert "CANCELLED" in out
    assert out.count("Traceback") <= 1, out


def test_what_srun_says_is_the_error(slurm: SlurmCluster) -> None:
    nodes = {"SLURM_JOB_ID": "999", "SLURM_JOB_NODELIST": "n[0-1]", "MOAI_FLAVOR": "2"}
    code, out = slurm.run(["sh", "-c", slurm.program(SUM)], **nodes)
    assert code != 0
    assert "the agent of host `n1` could not be started by srun: " in out
    assert "srun: error: Unable to confirm allocation for job 999: Invalid job id specified" in out
