"""A part of `bench/gpu.py`: training steps of a Llama by moaic and by `torch.compile` in turns, then eagerly.

Each way is a process of its own (`bench/gpu_train.py`). First moaic and `torch.compile` start, at once; then rounds, in
each of which both do some steps, so that what the GPU does meanwhile falls on both alike. Figures are medians over all
steps of all rounds. Beside moaic there is room on the GPU for one other: eager's steps come last, when `torch.compile`
has ended.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_findings import Check, Figure, LeftOut, Task, parser, task_of

OURS, COMPILED, EAGER = "moaic", "torch.compile", "eager"
OWN_KERNELS = f"{OURS}, own kernels"
"""With all of moaic's kernels, measured to win or not."""

STEPS = 5
"""Of each way in each round."""

MOST_ROUNDS = 4

TOKENS = 4096

EAGER_START = 12.0
"""Seconds that eager needs until its first steps are done, at most: it compiles nothing."""

ROOM = 0.8
"""Share of the GPU's memory that ways that run at once are meant to take: what they take is estimated."""

OUR_SHARE = 0.7
"""Of the time that is left: how long our own way is waited for."""

SAME = 0.02
"""Largest distance of the losses of two ways from one another, relative: bfloat16 over some steps."""


@dataclass(frozen=True, slots=True)
class Llama:
    """The sizes of a model and of its batch, which is one row."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    tied: bool
    vocabulary: int = 128256
    tokens: int = TOKENS

    @property
    def bytes_of_a_layer(self) -> int:
        """Parameters, gradients and AdamW's state in bfloat16, and what an eager forward keeps for its backward."""
        attention = self.hidden * self.hidden * (2 + 2 * self.kv_heads / self.heads)
        state = 8 * (attention + 3 * self.hidden * self.intermediate)
        return int(state + self.tokens * (30 * self.hidden + 8 * self.intermediate))

    @property
    def bytes_around(self) -> int:
        """The embedding and the head with gradients and state, and the logits with what a loss makes of them."""
        matrices = 1 if self.tied else 2
        return 8 * matrices * self.hidden * self.vocabulary + 16 * self.tokens * self.vocabulary

    def cut(self, room: int) -> Llama:
        """With as many of its layers as go into so many bytes, one at least."""
        return replace(self, layers=max(1, min(self.layers, (room - self.bytes_around) // self.bytes_of_a_layer)))


LLAMAS: Mapping[str, Llama] = {
    "1B": Llama(2048, 8192, 16, 32, 8, tied=True),
    "8B": Llama(4096, 14336, 32, 32, 8, tied=False),
}
"""The shapes of Llama 3."""

TINY: Mapping[str, Llama] = {
    "1B": Llama(64, 128, 1, 4, 2, tied=True, vocabulary=256, tokens=32),
    "8B": Llama(96, 128, 2, 4, 2, tied=False, vocabulary=256, tokens=32),
}

TINY_ROOM = 1_500_000
"""Bytes of which tiny models are cut to fit, too."""


WITH_MOAIC: Mapping[str, str] = {"MOAI_DEVICE": "1", "MOAI_FLAVOR": "1", "MOAI_LOG": "warning"}
"""Of our own way: one worker, on the one GPU."""

WITHOUT_MOAIC: Mapping[str, str] = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
"""Of the others: PyTorch as it is where moaic is not installed."""


LATER = 3.0
"""Seconds after the controller's end in which its workers have ended too."""


def is_ours(way: str) -> bool:
    return way.startswith(OURS)


class NoAnswer(Exception):
    """A way ended, said what went wrong, or did not answer in time."""


@dataclass(eq=False, slots=True)
class Way:
    """A way of training: a process that does what it is told, and answers each time."""

    name: str
    process: subprocess.Popen[str]
    answers: queue.Queue[str] = field(default_factory=queue.Queue[str])

    def __post_init__(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put("")

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{command}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise NoAnswer(f"ended with exit code {self.process.wait()}") from None

    def answer(self, seconds: float) -> Any:
        """Raises NoAnswer."""
        try:
            line = self.answers.get(timeout=max(0.0, seconds))
        except queue.Empty:
            raise NoAnswer("had not answered when time was up") from None
        if not line:
            raise NoAnswer(f"ended with exit code {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise NoAnswer(answer["error"])
        return answer

    def ask(self, command: str, seconds: float) -> Any:
        self.tell(command)
        return self.answer(seconds)

    def end(self) -> None:
        """With all that it started, and that ends a little later."""
        self.process.kill()
        self.process.wait()
        time.sleep(LATER)


@dataclass(slots=True)
class Run:
    """What one way has shown so far; bytes, and seconds of each step and of the process's own CPU time in it."""

    first_step: float
    loss_at_first: float
    steps: list[float] = field(default_factory=list[float])
    busy: list[float] = field(default_factory=list[float])
    loss: float = 0.0
    memory: int = 0
    held: int = 0
    """Bytes of the device, by all processes of this way."""
    repeated: int = 0
    """Steps that recordings stood for."""

    def take(self, answer: Mapping[str, Any]) -> None:
        self.steps += answer["steps"]
        self.busy += answer["busy"]
        self.loss, self.memory, self.repeated = answer["loss"], answer["memory"], answer["repeated"]


class Turns:
    """The ways that still run, and what they have shown."""

    def __init__(self, task: Task, ways: Mapping[str, Way], steps: int) -> None:
        """So many `steps` does each way in each round."""
        self._task = task
        self._steps = steps
        self._ways = dict(ways)
        self.runs: dict[str, Run] = {}

    def start(self, *names: str) -> None:
        """Their first steps, at once."""
        for name in names:
            self._tell(name)
        for name in names:
            self._started(name)

    def round(self, *names: str) -> None:
        for name in names:
            if (answer := self._asked(name, f"steps {self._steps}")) is not None:
                self.runs[name].take(answer)

    def end(self, name: str) -> None:
        """What is free afterwards it has held."""
        if name in self._ways and name in self.runs:
            before = free_memory(here=self._task.here)
            self._ways.pop(name).end()
            self.runs[name].held = max(0, free_memory(here=self._task.here) - before)

    def _tell(self, name: str) -> None:
        try:
            self._ways[name].tell("start")
        except NoAnswer as reason:
            self._drop(name, reason)

    def _started(self, name: str) -> None:
        if name not in self._ways:
            return
        try:
            answer = self._ways[name].answer(self._patience(name))
        except NoAnswer as reason:
            self._drop(name, reason)
            return
        self.runs[name] = Run(answer["first_step"], answer["loss"])

    def _patience(self, name: str) -> float:
        """Seconds for an answer: ours leaves the others some, should it never come."""
        return self._task.seconds_left * (OUR_SHARE if is_ours(name) else 1.0)

    def _asked(self, name: str, command: str) -> Any:
        """None of a way that has been dropped, or is now for want of an answer."""
        if name not in self._ways:
            return None
        try:
            return self._ways[name].ask(command, self._patience(name))
        except NoAnswer as reason:
            self._drop(name, reason)
            return None

    def _drop(self, name: str, reason: NoAnswer) -> None:
        self._ways.pop(name).process.kill()
        # Ours may be late because it waits for ever.
        late = self._task.seconds_left <= 0 and not is_ours(name)
        self._task.say(LeftOut(name, str(reason)) if late else Check(f"{name} runs", passed=False, detail=str(reason)))


def free_memory(*, here: bool) -> int:
    """Bytes of the GPU, or of this machine, that nobody holds."""
    if not here:
        return torch.cuda.mem_get_info()[0]
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


def rounds(task: Task, turns: Turns, ways: Sequence[str]) -> int:
    """Rounds of those that are compared until eager might not be done in time; how many there were."""
    for done in range(MOST_ROUNDS):
        before = task.seconds_left
        turns.round(*ways)
        if task.seconds_left < (len(ways) + 1) * LATER + EAGER_START + 2 * (before - task.seconds_left):
            return done + 1
    return MOST_ROUNDS


def report(task: Task, subject: str, llama: Llama, runs: Mapping[str, Run]) -> None:
    for way, run in runs.items():
        if run.steps:
            task.say(*figures(subject, llama, way, run))
    if OURS in runs and COMPILED in runs and runs[OURS].steps and runs[COMPILED].steps:
        task.say(*ratios(subject, runs[OURS], runs[COMPILED]))
    if OURS in runs and OWN_KERNELS in runs and runs[OURS].steps and runs[OWN_KERNELS].steps:
        speed = median(runs[OURS].steps) / median(runs[OWN_KERNELS].steps)
        task.say(Figure(subject, f"{OWN_KERNELS} / {OURS}", "tokens per second", speed, "x"))
    if OURS in runs and runs[OURS].steps:
        share = 100 * median(runs[OURS].busy) / median(runs[OURS].steps)
        task.say(Figure(subject, OURS, "controller's CPU time of the step", share, "%", "<= 1"))
    task.say(*losses(subject, runs))


def figures(subject: str, llama: Llama, way: str, run: Run) -> list[Figure]:
    step = median(run.steps)
    held = [Figure(subject, way, "memory held", run.held / 1e9, "GB")] if run.held else []
    return [
        Figure(subject, way, "tokens per second", llama.tokens / step, "1/s"),
        Figure(subject, way, "step", 1e3 * step, "ms"),
        Figure(subject, way, "peak memory", run.memory / 1e9, "GB"),
        *held,
        Figure(subject, way, "first step, cold", run.first_step, "s"),
        Figure(subject, way, "steps", len(run.steps), ""),
    ]


def ratios(subject: str, ours: Run, theirs: Run) -> list[Figure]:
    way = f"{OURS} / {COMPILED}"
    speed = median(theirs.steps) / median(ours.steps)
    found = [Figure(subject, way, "tokens per second", speed, "x", ">= 1.05")]
    for name, our, their in (("peak memory", ours.memory, theirs.memory), ("memory held", ours.held, theirs.held)):
        if our and their:
            found.append(Figure(subject, way, name, our / their, "x", "<= 0.8"))
    return found


def losses(subject: str, runs: Mapping[str, Run]) -> list[Check]:
    """All ways begin with the same weights and train on the same row: the loss falls, and alike."""
    found = [_falls(f"{subject}: the loss of {way} falls", run) for way, run in runs.items() if run.steps]
    first = {way: run.loss_at_first for way, run in runs.items()}
    if len(first) > 1:
        apart = (max(first.values()) - min(first.values())) / max(first.values())
        said = ", ".join(f"{way} {loss:.4f}" for way, loss in first.items())
        found.append(Check(f"{subject}: all ways begin with the same loss", apart <= SAME, said))
    return found


def _falls(name: str, run: Run) -> Check:
    return Check(name, run.loss < run.loss_at_first, f"{run.loss_at_first:.4f}, then {run.loss:.4f}")


def measure(task: Task, name: str, *, own_kernels: bool) -> None:
    """All ways train the model of this name, cut to fit."""
    whole = (TINY if task.here else LLAMAS)[name]
    compared = (OURS, *([OWN_KERNELS] if own_kernels else []), COMPILED)
    room = TINY_ROOM if task.here else int(ROOM * torch.cuda.mem_get_info()[1] / len(compared))
    llama = whole.cut(room)
    subject = f"{name} Llama, {llama.layers} of {whole.layers} layers, {llama.tokens} tokens"
    with ExitStack() as running:
        ways = {way: Way(way, running.enter_context(started(way, llama, task))) for way in (*compared, EAGER)}
        running.callback(lambda: [way.process.kill() for way in ways.values()])
        turns = Turns(task, ways, STEPS)
        with task.beside():
            turns.start(*compared)
        with task.alone():
            done = rounds(task, turns, compared) if turns.runs and task.seconds_left > 0 else 0
            turns.end(COMPILED)
            turns.start(EAGER)
            turns.round(EAGER)
            for way in (EAGER, *compared):
                turns.end(way)
        report(task, subject, llama, turns.runs)
        task.say(*cuts(subject, llama, whole, done))


def cuts(subject: str, llama: Llama, whole: Llama, done: int) -> list[LeftOut]:
    found: list[LeftOut] = []
    if llama.layers < whole.layers:
        found.append(
            LeftOut(f"{subject}: {whole.layers - llama.layers} layers", "ways that run at once must fit the memory")
        )
    if done < MOST_ROUNDS:
        found.append(LeftOut(f"{subject}: {MOST_ROUNDS - done} of {MOST_ROUNDS} rounds", "no time was left"))
    return found


def started(way: str, llama: Llama, task: Task) -> subprocess.Popen[str]:
    script = Path(__file__).with_name("gpu_train.py")
    device = "moai" if is_ours(way) else task.device
    command = [sys.executable, str(script), way, device, json.dumps(asdict(llama))]
    variables = os.environ | (WITH_MOAIC if is_ours(way) else WITHOUT_MOAIC)
    if way == OWN_KERNELS:
        variables["MOAI_KERNELS"] = "all"
    return subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--model", choices=LLAMAS, required=True)
    arguments.add_argument("--own-kernels", action="store_true", help="a way with all of moaic's kernels, too")
    args = arguments.parse_args()
    task = task_of(args)
    with task.in_time():
        measure(task, args.model, own_kernels=args.own_kernels)


if __name__ == "__main__":
    main()
