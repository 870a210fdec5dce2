"""Errors that the user sees if workers raise or die, and that no process or memory is left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.runtime.conftest import Script

START = """
import os, signal, sys, threading, time
import torch
from moaic.runtime.controller.session import accelerator
from moaic.runtime.controller.buffer import whole

def up(tensor, dtype="f32"):
    buffer = device.buffer(dtype, tuple(tensor.shape))
    device.upload(buffer, tensor)
    return buffer

device = accelerator()
x = up(torch.ones(4, 4))
device.launch("aten.add_.Scalar", (whole(x), 1), {}, ())
device.synchronize()
pids = [worker.pid for worker in device.stats().workers]
print("workers", *pids, flush=True)
"""

LONG = """
big = up(torch.ones(3000, 3000))
for _ in range(300):
    out = device.buffer("f32", (3000, 3000))
    device.launch("aten.mm", (whole(big), whole(big)), {}, (out,))
"""


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def gone(pids: list[int], seconds: float = 2.0) -> bool:
    """Whether all the processes end within that time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not any(lives(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def started(script: Script, text: str) -> list[int]:
    """Starts a program; its workers' process ids."""
    word, *pids = script.start(START + text)
    assert word == "workers", (word, pids)
    return [int(pid) for pid in pids]


ENDINGS = {"returns": "", "raises": LONG + "raise SystemError", "leaves": LONG + "device._pool.flush(); os._exit(0)"}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ending", ENDINGS)
def test_workers_end_with_the_program(script: Script, ending: str) -> None:
    files = set(Path("/dev/shm").iterdir())
    pids = started(script, ENDINGS[ending])
    assert script.process is not None
    script.process.wait(20)
    assert gone(pids)
    assert set(Path("/dev/shm").iterdir()) <= files


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("number", "work"),
    [
        (signal.SIGKILL, LONG + "device.synchronize()"),
        (signal.SIGINT, LONG + "device.synchronize()"),
        (signal.SIGTERM, ""),
    ],
    ids=["SIGKILL while busy", "SIGINT while busy", "SIGTERM while idle"],
)
def test_workers_end_when_the_program_is_killed(script: Script, number: signal.Signals, work: str) -> None:
    pids = started(script, f"print('ready', flush=True)\n{work}\ntime.sleep(60)")
    assert script.line() == "ready\n"
    time.sleep(0.3)
    assert script.process is not None
    script.process.send_signal(number)
    began = time.monotonic()
    printed, _ = script.process.communicate(timeout=5)
    assert time.monotonic() - began < 2
    assert gone(pids)
    assert number is signal.SIGINT or not printed, printed


FORK = """
child = os.fork()
if child == 0:
    try:
        accelerator()
    except Exception as error:
        print("child:", str(error).splitlines()[0], flush=True)
    time.sleep(30)
    os._exit(0)
time.sleep(0.5)
print("child is", child, flush=True)
device.launch("aten.add_.Scalar", (whole(x), 1), {}, ())
assert device.download(whole(x))[0, 0] == 3
os._exit(0)
"""


@pytest.mark.timeout(60)
def test_workers_end_although_a_forked_child_lives_on(script: Script) -> None:
    pids = started(script, FORK)
    assert "this process was forked" in script.line()
    child = int(script.line().split()[-1])
    assert script.process is not None
    assert script.process.wait(20) == 0
    assert gone(pids)
    assert lives(child)
    os.kill(child, signal.SIGKILL)


KILLED = (
    LONG
    + """
device._pool.flush()
time.sleep(0.3)
os.kill(pids[1], signal.SIGKILL)
start = time.monotonic()
for _ in range(2):
    try:
        device.synchronize()
    except Exception as error:
        print(type(error).__name__, str(error), flush=True)
try:
    device.launch("aten.add_.Scalar", (whole(x), 1), {}, ())
except Exception as error:
    print(type(error).__name__, flush=True)
print("seconds", time.monotonic() - start)
"""
)


@pytest.mark.timeout(60)
def test_a_worker_that_is_killed_is_named(script: Script) -> None:
    pids = started(script, KILLED)
    first, second, third, seconds = script.finish().splitlines()
    assert first.startswith("WorkerError worker 1 of 2 failed in aten.mm, asked for at ")
    assert first.endswith(f"{script.place('aten.mm')}: the process was killed by SIGKILL")
    assert second == first
    assert third == "WorkerError"
    assert float(seconds.split()[1]) < 5
    assert gone(pids)


COLLECTIVE = '''
text = """// moai 1
mesh [dp=2]
func @seg(%x: f32[4, 4], %i: i64[2]) -> (f32[4, 4] +dp) {
  %y = aten.index.Tensor %x, [%i] : f32[2, 4]
  %z = aten.cat [%y, %y] {dim = 0} : f32[4, 4] +dp
  return %z
}
func @main(%x: f32[4, 4], %i: i64[2]) -> (f32[4, 4]) {
  %y = call @seg %x, %i : f32[4, 4] +dp    at "model.py":12
  %z = moai.all_reduce %y {axis = "dp"} : f32[4, 4]
  return %z
}
"""
program = device.load(text, compiled=False)
out = device.buffer("f32", (4, 4))
'''

RAISING = (
    COLLECTIVE
    + """
index = up(torch.tensor([0, 9]), "i64")
device.run(program, [x, index], [out])
try:
    device.download(whole(out))
except IndexError as error:
    print(error, flush=True)
device.upload(index, torch.tensor([0, 3]))
device.run(program, [x, index], [out])
print(*device.download(whole(out))[0].tolist())
"""
)


@pytest.mark.timeout(60)
def test_an_error_of_a_program_names_the_instruction_and_the_program_runs_again(script: Script) -> None:
    started(script, RAISING)
    message, place, again = script.finish().splitlines()
    assert message == "index 9 is out of bounds for dimension 0 with size 4"
    assert place.endswith("in segment @seg (instruction 1 of 2, from model.py:12) of program 0")
    assert f"{script.place('device.run')}, in" in place
    assert again == "4.0 4.0 4.0 4.0"


STOPPED = (
    COLLECTIVE
    + """
index = up(torch.tensor([0, 1]), "i64")
os.kill(pids[0], signal.SIGSTOP)
device.run(program, [x, index], [out])
time.sleep(0.5)
os.kill(pids[0], signal.SIGKILL)
start = time.monotonic()
try:
    device.synchronize()
except RuntimeError as error:
    print(error, flush=True)
print("seconds", time.monotonic() - start)
"""
)


@pytest.mark.timeout(60)
def test_nobody_waits_for_a_dead_peer(script: Script) -> None:
    pids = started(script, STOPPED)
    printed = script.finish()
    assert printed.startswith("worker 0 of 2 failed in"), printed
    assert "killed by SIGKILL" in printed
    assert float(printed.split()[-1]) < 5
    assert gone(pids)


THREAD = """
def backward():
    index, out = up(torch.tensor([9]), "i64"), device.buffer("f32", (1, 4))
    device.launch("aten.index_select", (whole(x), 0, whole(index)), {}, (out,))

thread = threading.Thread(target=backward)
thread.start()
thread.join()
try:
    device.synchronize()
except IndexError as error:
    print(error, flush=True)
"""


@pytest.mark.timeout(60)
def test_errors_on_another_thread_name_its_line(script: Script) -> None:
    started(script, THREAD)
    _, place = script.finish().splitlines()
    assert place.endswith(", in aten.index_select")
    assert script.place("{}, (out,)") in place


SHORT = LONG.replace("range(300)", "range(2)")

INTERRUPTED = (
    SHORT
    + """
signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
signal.setitimer(signal.ITIMER_REAL, 0.3)
try:
    device.synchronize()
except KeyboardInterrupt:
    print("interrupted", flush=True)
for value in (3, 4):
    device.launch("aten.add_.Scalar", (whole(x), 1), {}, ())
    assert device.download(whole(x))[0, 0] == value
device.synchronize()
print("went on", flush=True)
"""
)


@pytest.mark.timeout(60)
def test_work_goes_on_after_an_interrupt(script: Script) -> None:
    started(script, INTERRUPTED)
    assert script.finish().splitlines() == ["interrupted", "went on"]


STUCK = """
time.sleep(1.5)
os.kill(pids[1], signal.SIGSTOP)
device.launch("aten.add_.Scalar", (whole(x), 1), {}, ())
try:
    device.synchronize()
except RuntimeError as error:
    print(error, flush=True)
"""


@pytest.mark.timeout(60)
def test_a_worker_that_is_stuck_is_named(script: Script) -> None:
    pids = started(script, STUCK)
    assert script.finish().startswith("worker 1 of 2 failed in ")
    assert gone(pids)
