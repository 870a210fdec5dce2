"""`bench/gpu.py`: every outcome of its parts, their findings, and all of it on the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import generate
import gpu
import gpu_llama
import gpu_report
import pytest
import torch
from gpu_findings import Check, Figure, LeftOut, Task, findings_in
from gpu_report import DONE, Ended, Report

ROOT = Path(__file__).parent.parent

HEAD = """
import sys, time
sys.path.insert(0, "bench")
from gpu_findings import Check, Figure, LeftOut, parser, task_of
task = task_of(parser(__doc__).parse_args())
"""
"""How every part begins."""

GOOD = """
task.say(Check("one is one", True), Figure("norm", "ours", "time", 0.5, "ms", "< 1"), LeftOut("two", "no time"))
"""

WRONG = 'task.say(Check("one is two", False, "off by\\n1"), Check("one is one", True))'

CRASHED = 'task.say(Figure("norm", "ours", "time", 1234.5, "ms")); raise RuntimeError("this part is broken")'

KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"

HANGING = 'task.say(Check("begun", True)); time.sleep(600)'

FOUND = {"gpu": {"name": "a GPU", "memory_bytes": 8 * 10**10}, "versions": {"torch": "2.13.0", "triton": "3.7.1"}}


def part(folder: Path, name: str, text: str, share: float = 1.0) -> gpu.Part:
    script = folder / f"{name}.py"
    script.write_text(HEAD + text, encoding="utf-8")
    return gpu.Part(name, script, share)


def test_what_one_part_does_to_itself_leaves_the_others_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "GRACE", 0.2)
    texts = {"wrong": WRONG, "crashed": CRASHED, "killed": KILLED, "hanging": HANGING, "good": GOOD}
    parts = [part(tmp_path, name, text) for name, text in texts.items()]
    path = tmp_path / "kept" / "gpu.json"
    start = time.monotonic()
    assert gpu.measure(parts, FOUND, path, start, 12.0, here=False) == 1
    assert time.monotonic() - start < 20
    report = gpu_report.from_json(path.read_text(encoding="utf-8"))
    ends = {each.name: each for each in report.parts}
    assert list(ends) != list(texts), "the hanging one is the last to end"
    assert [name for name, each in ends.items() if each.passed] == ["good"]
    assert ends["wrong"].failed == [Check("one is two", passed=False, detail="off by\n1")]
    assert ends["crashed"].end == "it ended with exit code 1"
    assert "RuntimeError: this part is broken" in ends["crashed"].log
    assert ends["crashed"].figures == [Figure("norm", "ours", "time", 1234.5, "ms")]
    assert ends["killed"].end == "it was ended by SIGSEGV"
    assert ends["hanging"].end == "it had not ended 0 s after its time"
    assert ends["hanging"].checks == [Check("begun", passed=True)]
    assert ends["good"].left_out == [LeftOut("two", "no time")]
    printed = capsys.readouterr().out
    assert "* FAILED one is two: off by 1" in printed
    assert "| norm | ours | 1,234 ms |" in printed
    assert "| norm | ours | 0.5 ms (wanted < 1) |" in printed
    (verdict,) = (line for line in printed.splitlines() if line.startswith("**FAILED: ") and "hanging" in line)
    assert {*verdict.split("**")[1].removeprefix("FAILED: ").split(", ")} == {"wrong", "crashed", "killed", "hanging"}


def test_what_parts_start_ends_with_them(tmp_path: Path) -> None:
    text = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True); sys.exit(1)"
    ended = gpu.run(part(tmp_path, "parent", text), 30.0, tmp_path, here=False)
    child = Path(f"/proc/{int(ended.log)}/cmdline")
    late = time.monotonic() + 10
    while child.exists() and child.read_bytes() and time.monotonic() < late:
        time.sleep(0.02)
    assert not child.exists() or not child.read_bytes()


GREEDY = """
with task.alone():
    while task.seconds_left > -60: time.sleep(0.1)
"""

PATIENT = "time.sleep(0.5)\nwith task.in_time(), task.alone(): pass"

FORKS = """
import os
with task.beside():
    if not os.fork(): time.sleep(600); os._exit(0)
with task.alone():
    task.say(Check("alone", True))
"""


def test_a_part_that_keeps_the_gpu_costs_the_others_their_times_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "GRACE", 2.0)
    parts = [part(tmp_path, "greedy", GREEDY), part(tmp_path, "patient", PATIENT)]
    ends = {each.name: each for each in gpu.run_all(parts, time.monotonic() + gpu.GRACE + 4, tmp_path, here=False)}
    (left,) = ends["patient"].left_out
    assert left.reason == "other parts kept the GPU until the time was over"
    assert ends["patient"].end == DONE
    assert ends["greedy"].end != DONE


def test_a_process_that_a_part_has_forked_does_not_keep_the_gpu(tmp_path: Path) -> None:
    (ended,) = gpu.run_all([part(tmp_path, "forks", FORKS)], time.monotonic() + gpu.GRACE + 20, tmp_path, here=False)
    assert ended.end == DONE
    assert ended.seconds < 15


def test_an_interrupt_ends_the_parts(tmp_path: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTED, str(part(tmp_path, "hanging", HANGING).script), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "bench")))}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        findings = tmp_path / "hanging.findings"
        late = time.monotonic() + 60
        while not findings.exists() and time.monotonic() < late:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in said


INTERRUPTED = """
import sys, time
from pathlib import Path
import gpu
script, folder = map(Path, sys.argv[1:])
list(gpu.run_all([gpu.Part("hanging", script, 1.0)], time.monotonic() + 300, folder, here=False))
"""


def test_all_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpu.json"
    assert gpu.measure([part(tmp_path, "good", GOOD)], FOUND, path, time.monotonic(), 60.0, here=False) == 0
    printed = capsys.readouterr().out
    assert "## a GPU, 80 GB" in printed
    assert "torch 2.13.0, triton 3.7.1" in printed
    assert "Everything that was checked holds." in printed
    report = gpu_report.from_json(path.read_text(encoding="utf-8"))
    assert gpu_report.to_json(report) == path.read_text(encoding="utf-8")


def test_time_that_is_left_over_is_the_others() -> None:
    stages = gpu.staged(gpu.PARTS, here=False)
    assert [part for stage in stages for part in stage] == list(gpu.PARTS)
    assert sum(max(part.share for part in stage) for stage in stages) <= gpu.LIMIT
    assert gpu.allotted(stages[-1:], 100.0) == 100.0
    assert all(gpu.allotted(stages, gpu.LIMIT) >= part.share for part in stages[0])


TURNS = """
with task.beside():
    began = time.monotonic()
    time.sleep(1)
    ended = time.monotonic()
with task.alone():
    alone = time.monotonic()
    time.sleep(0.3)
    last = time.monotonic()
times = {"began": began, "ended": ended, "alone": alone, "last": last}
task.say(*(Figure("turns", "ours", name, value, "s") for name, value in times.items()))
"""


def test_parts_of_a_stage_run_at_once_but_take_times_alone(tmp_path: Path) -> None:
    parts = [part(tmp_path, name, TURNS) for name in ("one", "two")]
    ends = list(gpu.run_all(parts, time.monotonic() + 60, tmp_path, here=False))
    one, two = ({each.name: each.value for each in end.figures} for end in ends)
    assert max(one["began"], two["began"]) < min(one["ended"], two["ended"]) < min(one["alone"], two["alone"])
    assert one["last"] <= two["alone"] or two["last"] <= one["alone"]
    assert max(one["ended"], two["ended"]) <= min(one["alone"], two["alone"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu() -> None:
    done = subprocess.run([sys.executable, "bench/gpu.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"error: there is no GPU here that this PyTorch ({torch.__version__}) can use\nhint: "
    )
    assert done.stdout == ""


def test_layers_are_cut_to_fit() -> None:
    """About what is known of such models: bytes of parameters, gradients, state, activations and logits."""
    small, large = gpu_llama.LLAMAS["1B"], gpu_llama.LLAMAS["8B"]
    assert small.cut(80 * 10**9) == small
    assert large.cut(10**9).layers == 1
    half = large.cut(32 * 10**9)
    assert 1 < half.layers < 32
    assert half.bytes_around + half.layers * half.bytes_of_a_layer <= 32 * 10**9
    assert half.bytes_around + (half.layers + 1) * half.bytes_of_a_layer > 32 * 10**9


def test_a_run_that_lost_a_way_reports_the_others(tmp_path: Path) -> None:
    task = Task(tmp_path / "findings", time.monotonic() + 60, here=True)
    ours = gpu_llama.Run(9.0, 12.0, [0.4, 0.5, 0.6], [0.001, 0.001, 0.002], 11.0, 10**9)
    eager = gpu_llama.Run(3.0, 12.1, [1.0, 1.0, 1.0], [1.0, 1.0, 1.0], 12.5, 2 * 10**9)
    gpu_llama.report(task, "1B", gpu_llama.LLAMAS["1B"], {"moaic": ours, "eager": eager})
    said = list(findings_in(task.findings))
    assert Figure("1B", "moaic", "tokens per second", 8192.0, "1/s") in said
    assert Figure("1B", "moaic", "controller's CPU time of the step", 0.2, "%", "<= 1") in said
    failed = [each for each in said if isinstance(each, Check) and not each.passed]
    assert [each.name for each in failed] == ["1B: the loss of eager falls"]
    both = gpu_llama.ratios("1B", ours, eager)
    assert [(each.value, each.wanted) for each in both] == [(2.0, ">= 1.05"), (0.5, "<= 0.8")]


ANSWERS = """
import json, sys
for line in sys.stdin:
    steps = {"steps": [0.1], "busy": [0.1], "loss": 1.0, "memory": 1, "repeated": 3}
    print(json.dumps({"loss": 2.0, "first_step": 0.5} if line == "start\\n" else steps), flush=True)
"""

ENDS = "import sys; sys.stdin.readline(); sys.exit(3)"

WAITS = "import time; time.sleep(600)"


def test_a_way_that_hangs_or_ends_is_said_once_and_the_others_go_on(tmp_path: Path) -> None:
    """Ours that hangs is a failure, however late: time is left for the others."""
    task = Task(tmp_path / "findings", time.monotonic() + 5, here=True)
    texts = {"moaic, repeated": WAITS, "eager": ENDS, "torch.compile": ANSWERS}
    with ExitStack() as running:
        ways = {name: gpu_llama.Way(name, running.enter_context(way(text))) for name, text in texts.items()}
        running.callback(lambda: [each.process.kill() for each in ways.values()])
        turns = gpu_llama.Turns(task, ways, 1)
        turns.start(*ways)
        for _ in range(2):
            turns.round(*ways)
    assert task.seconds_left > 0
    assert {name: (run.steps, run.repeated) for name, run in turns.runs.items()} == {"torch.compile": ([0.1, 0.1], 3)}
    assert list(findings_in(task.findings)) == [
        Check("moaic, repeated runs", passed=False, detail="had not answered when time was up"),
        Check("eager runs", passed=False, detail="ended with exit code 3"),
    ]


def way(text: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", text]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)


def test_the_page_says_that_nothing_is_measured_or_what_is(tmp_path: Path) -> None:
    assert "**No GPU has been measured yet.**" in gpu_report.page(tmp_path)
    done = Ended("timed", 60.0, 50.0, DONE, "", (Figure("norm", "ours", "time", 0.5, "ms"),))
    for name, here in (("one", False), ("two", True)):
        report = Report("2030-01-01", f"GPU {name}", {"torch": "2.13.0"}, here, 480.0, 50.0, (done,))
        (tmp_path / f"{name}.json").write_text(gpu_report.to_json(report), encoding="utf-8")
    page = gpu_report.page(tmp_path)
    assert "## GPU one" in page
    assert "GPU two" not in page
    assert "| norm | ours | 0.5 ms |" in page
    assert "No GPU has been measured yet" not in page
    assert generate.PAGES["measured.md"]().startswith("# Measured on GPUs")


@pytest.mark.exact
@pytest.mark.timeout(1800)
def test_every_part_runs_on_the_cpu(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    done = subprocess.run(
        [sys.executable, "bench/gpu.py", "--here", "--json", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(path.read_text(encoding="utf-8"))["here"] is True
    report = gpu_report.from_json(path.read_text(encoding="utf-8"))
    kernels, plans, small, large, repeated, timed = report.parts
    assert {"check_norm", "check_adamw", "check_merge"} <= {each.name for each in kernels.checks}
    assert {each.name for each in plans.checks} == {
        "dp2, op by op",
        "tp2, op by op",
        "pp2, op by op",
        "dp2, compiled",
        "dp2, float8, compiled",
    }
    for part in (small, large):
        assert {"moaic", "torch.compile", "eager", "moaic / torch.compile"} == {each.way for each in part.figures}
        assert all(each.value > 0 for each in part.figures)
        names = {each.name for each in part.figures if each.way == "moaic"}
        assert {"tokens per second", "step", "peak memory", "controller's CPU time of the step"} <= names
    assert {each.way for each in repeated.figures} >= {"moaic", "moaic, no graphs", "torch.compile, reduce-overhead"}
    assert "layers" in large.left_out[0].name
    assert {each.way for each in timed.figures} >= {"ours", "inductor", "inductor / ours"}
    assert done.stdout.count("\n### ") == len(gpu.PARTS)
