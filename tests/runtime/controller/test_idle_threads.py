"""Idle threads of OpenMP leave the cores to the workers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from moaic.runtime.host.cores import cores

COPIES = 100

SCRIPT = f"""
import os, threading, time, torch
from moaic.runtime.controller.idle_threads import let_sleep

source, target = torch.ones(1 << 17), torch.empty(1 << 17)

def others():
    "All threads but the main one."
    return set(os.listdir("/proc/self/task")) - {{str(os.getpid())}}

def seconds():
    "Seconds of computing by the others."
    return sum(int(open(f"/proc/self/task/{{task}}/schedstat").read().split()[0]) for task in others()) / 1e9

target.copy_(source)
alone = len(others())
let_sleep()
idle = [thread for thread in threading.enumerate() if thread.name == "idle"]
assert len(others()) >= alone + len(idle) * torch.get_num_threads() > alone
before = seconds()
for _ in range({COPIES}):
    target.copy_(source)
    time.sleep(0.01)
print(seconds() - before)
"""


@pytest.mark.skipif(cores() == 1, reason="a thread alone waits for no other")
def test_sleep_between_parallel_ops_of_the_script() -> None:
    output = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=120)
    # Spinning threads take milliseconds after every copy.
    assert float(output.stdout) < COPIES * 1e-3
