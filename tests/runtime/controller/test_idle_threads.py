"""Idle threads of OpenMP leave the cores to the workers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from moaic.runtime.host.cores import cores

COPIES = 100

SCRIPT = f"""
import os, time, torch
from moaic.runtime.controller.idle_threads import let_sleep

source, target = torch.ones(1 << 17), torch.empty(1 << 17)

def others():
    "Seconds of computing by all threads but the main one."
    tasks = set(os.listdir("/proc/self/task")) - {{str(os.getpid())}}
    return sum(int(open(f"/proc/self/task/{{task}}/schedstat").read().split()[0]) for task in tasks) / 1e9

target.copy_(source)
let_sleep()
time.sleep(0.1)
before = others()
for _ in range({COPIES}):
    target.copy_(source)
    time.sleep(0.01)
print(others() - before)
"""


@pytest.mark.skipif(cores() == 1, reason="a thread alone waits for no other")
def test_sleep_between_parallel_ops_of_the_script() -> None:
    output = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=120)
    # Spinning threads take milliseconds after every copy.
    assert float(output.stdout) < COPIES * 1e-3
