"""A part of `bench/gpu.py`: steps of a small Llama, whose kernels run shorter than their launches.

moaic and `torch.compile`, each with and without CUDA graphs. Each way is a process; all share the GPU and take turns.
"""

from __future__ import annotations

from contextlib import ExitStack
from statistics import median

from gpu_findings import Check, Figure, LeftOut, Task, parser, task_of
from gpu_llama import COMPILED, OURS, Llama, Run, Turns, Way, losses, started

OURS_PLAIN, COMPILED_REPEATED = f"{OURS}, no graphs", f"{COMPILED}, reduce-overhead"
WAYS = (OURS, OURS_PLAIN, COMPILED, COMPILED_REPEATED)

SMALL = Llama(512, 1536, 8, 8, 4, tied=True, vocabulary=8192, tokens=512)
TINY = Llama(64, 128, 1, 4, 2, tied=True, vocabulary=256, tokens=32)

STEPS = 20
"""Of each way in each round."""

ROUNDS = 5


def measure(task: Task) -> None:
    llama = TINY if task.here else SMALL
    subject = f"Llama of {llama.layers} layers, {llama.hidden} wide, {llama.tokens} tokens"
    with ExitStack() as running:
        ways = {name: Way(name, running.enter_context(started(name, llama, task))) for name in WAYS}
        running.callback(lambda: [way.process.kill() for way in ways.values()])
        turns = Turns(task, ways, STEPS)
        with task.beside():
            turns.start(*WAYS)
        with task.alone():
            rounds(task, turns)
    report(task, subject, turns.runs)


def rounds(task: Task, turns: Turns) -> None:
    longest = 0.0
    for done in range(ROUNDS):
        before = task.seconds_left
        if before < 2 * longest:
            task.say(LeftOut(f"{ROUNDS - done} of {ROUNDS} rounds", "no time was left"))
            break
        turns.round(*WAYS)
        longest = max(longest, before - task.seconds_left)


def report(task: Task, subject: str, runs: dict[str, Run]) -> None:
    timed = {name: run for name, run in runs.items() if run.steps}
    for name, run in timed.items():
        task.say(Figure(subject, name, "step", 1e3 * median(run.steps), "ms"))
        task.say(Figure(subject, name, "peak memory", run.memory / 1e9, "GB"))
    for one, other in ((OURS, OURS_PLAIN), (OURS, COMPILED), (OURS, COMPILED_REPEATED)):
        if one in timed and other in timed:
            speed = median(timed[other].steps) / median(timed[one].steps)
            task.say(Figure(subject, f"{one} / {other}", "steps per second", speed, "x"))
    if task.here:
        task.say(LeftOut("steps are repeated", "a CPU records nothing"))
    elif OURS in timed:
        repeated = timed[OURS].repeated
        task.say(Check("steps are repeated", passed=repeated > 0, detail=f"{repeated} of them"))
    task.say(*losses(subject, timed))


def main() -> None:
    task = task_of(parser(__doc__).parse_args())
    with task.in_time():
        measure(task)


if __name__ == "__main__":
    main()
