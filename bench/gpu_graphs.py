"""A part of `bench/gpu.py`: steps of a Llama so small that asking for its kernels takes longer than they do.

moaic and `torch.compile`, each as it is and with steps that the GPU repeats (CUDA graphs). Each way is a process of its
own; all are on the GPU at once, and take turns.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from statistics import median

from gpu_findings import Check, Figure, LeftOut, Task, parser, task_of
from gpu_llama import COMPILED, OURS, Llama, NoAnswer, Run, Way, losses, started

OURS_REPEATED, COMPILED_REPEATED = f"{OURS}, repeated", f"{COMPILED}, reduce-overhead"
WAYS = (OURS, OURS_REPEATED, COMPILED, COMPILED_REPEATED)

SMALL = Llama(512, 1536, 8, 8, 4, tied=True, vocabulary=8192, tokens=512)
TINY = Llama(64, 128, 1, 4, 2, tied=True, vocabulary=256, tokens=32)

STEPS = 20
"""Of each way in each round."""

ROUNDS = 5


def measure(task: Task) -> None:
    llama = TINY if task.here else SMALL
    subject = f"Llama of {llama.layers} layers, {llama.hidden} wide, {llama.tokens} tokens"
    runs: dict[str, Run] = {}
    with ExitStack() as running:
        ways = {name: Way(name, running.enter_context(started(name, llama, task))) for name in WAYS}
        running.callback(lambda: [way.process.kill() for way in ways.values()])
        for name, way in ways.items():
            with said(task, name):
                way.tell("start")
        for name, way in ways.items():
            with said(task, name):
                answer = way.answer(task.seconds_left)
                runs[name] = Run(answer["first_step"], answer["loss"])
        repeated = rounds(task, {name: ways[name] for name in runs}, runs)
    report(task, subject, runs, repeated)


@contextmanager
def said(task: Task, name: str) -> Generator[None]:
    """A way that does not answer leaves the others' figures."""
    try:
        yield
    except NoAnswer as reason:
        late = task.seconds_left <= 0
        task.say(LeftOut(name, str(reason)) if late else Check(f"{name} runs", passed=False, detail=str(reason)))


def rounds(task: Task, ways: dict[str, Way], runs: dict[str, Run]) -> int:
    """In turns; how many steps moaic has repeated."""
    repeated, longest = 0, 0.0
    for done in range(ROUNDS):
        before = task.seconds_left
        if before < 2 * longest:
            task.say(LeftOut(f"{ROUNDS - done} of {ROUNDS} rounds", "no time was left"))
            break
        for name, way in ways.items():
            with said(task, name):
                answer = way.ask(f"steps {STEPS}", task.seconds_left)
                runs[name].take(answer)
                repeated = answer["repeated"] if name == OURS_REPEATED else repeated
        longest = max(longest, before - task.seconds_left)
    return repeated


def report(task: Task, subject: str, runs: dict[str, Run], repeated: int) -> None:
    timed = {name: run for name, run in runs.items() if run.steps}
    for name, run in timed.items():
        task.say(Figure(subject, name, "step", 1e3 * median(run.steps), "ms"))
        task.say(Figure(subject, name, "peak memory", run.memory / 1e9, "GB"))
    for one, other in ((OURS_REPEATED, OURS), (OURS_REPEATED, COMPILED), (OURS_REPEATED, COMPILED_REPEATED)):
        if one in timed and other in timed:
            speed = median(timed[other].steps) / median(timed[one].steps)
            task.say(Figure(subject, f"{one} / {other}", "steps per second", speed, "x"))
    if task.here:
        task.say(LeftOut("steps are repeated", "a CPU records nothing"))
    elif OURS_REPEATED in timed:
        task.say(Check("steps are repeated", passed=repeated > 0, detail=f"{repeated} of them"))
    task.say(*losses(subject, timed))


def main() -> None:
    measure(task_of(parser(__doc__).parse_args()))


if __name__ == "__main__":
    main()
