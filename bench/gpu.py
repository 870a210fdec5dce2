"""Checks and measurements of moaic on one GPU, in four minutes.

moaic's kernels are checked against their references, and plans of small models against plain PyTorch. Then training
steps of two Llamas are timed beside `torch.compile` and eager PyTorch, those of a small one with and without CUDA
graphs, and the kernels beside Inductor's and Liger-Kernel's. Every part is a process: if one fails or is cut, the
report says so and keeps the figures of the others. Those of one stage run at once, but each is alone on the GPU while
it takes times. Exit code 1: a check or a part failed; 2: there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu_findings import findings_in
from gpu_report import DONE, Ended, Report, foot, head, section, to_json

ROOT = Path(__file__).parent.parent
BENCH = Path(__file__).parent

LIMIT = 240.0
"""Seconds of the whole, with sixteen cores."""

LIMIT_HERE = 1440.0
"""The same on the CPU, where a few cores may have to do all the compiling."""

GRACE = 8.0
"""Seconds that a part may take to end after the time that it was told."""

LOG = 2000
"""Characters of what a part printed that are kept where it did not end well."""

NO_GPU = (
    "error: there is no GPU here that this PyTorch ({torch}) can use\n"
    "hint: run this on a machine with one, or give --here to try the script itself on the CPU, at tiny sizes"
)


@dataclass(frozen=True, slots=True)
class Part:
    """A script, and how many seconds its stage is meant to have, at least, of a run that uses all of its time."""

    name: str
    script: Path
    share: float
    stage: int = 0
    until: float = 1.0
    """Share of its stage's time after which it should have ended, so that others can take times."""
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    here: Mapping[str, str] = field(default_factory=dict[str, str])
    """More of its environment, on the CPU."""


SEVERAL_WORKERS = {"MOAI_DEVICE": "1", "MOAI_FLAVOR": "2", "MOAI_LOG": "warning", "MOAI_COMPILE": "wait"}
"""Two workers, on the one GPU, which run what is compiled; MOAI_DEVICE, as beside a real GPU nobody is given the device
unasked."""

INTERPRETED = {"TRITON_INTERPRET": "1"}

EMULATED = {"MOAI_WORKERS": "triton", "MOAI_KERNELS": "all"}
"""Workers that run what a GPU would run, on the CPU."""

CHECKED = 0.65
"""Of a stage's time: when checks should have ended."""

PARTS = (
    Part("Own kernels beside their references", BENCH / "gpu_check_kernels.py", 60, until=CHECKED, here=INTERPRETED),
    Part(
        "Plans beside one device",
        BENCH / "gpu_check_plans.py",
        80,
        until=CHECKED,
        environment=SEVERAL_WORKERS,
        here=EMULATED,
    ),
    Part(
        "Training steps of a 1B Llama",
        BENCH / "gpu_llama.py",
        110,
        options=("--model", "1B", "--own-kernels"),
        here=EMULATED,
    ),
    Part("Training steps of an 8B-shaped Llama", BENCH / "gpu_llama.py", 120, stage=1, options=("--model", "8B")),
    Part("Training steps of a small Llama", BENCH / "gpu_graphs.py", 60, stage=1),
    Part("Own kernels timed", BENCH / "gpu_time_kernels.py", 60, stage=1, here=INTERPRETED),
)


def staged(parts: Sequence[Part], *, here: bool) -> list[list[Part]]:
    """Those that run at once; on the CPU each is a stage, as there are few cores."""
    if here:
        return [[part] for part in parts]
    return [[part for part in parts if part.stage == stage] for stage in sorted({part.stage for part in parts})]


def allotted(stages: Sequence[Sequence[Part]], left: float) -> float:
    """Seconds of the first of the stages that are still to come: its share of all that is left."""
    shares = [max(part.share for part in stage) for stage in stages]
    return left * shares[0] / sum(shares)


def run_all(parts: Sequence[Part], deadline: float, folder: Path, *, here: bool) -> Iterator[Ended]:
    """Stage after stage, each part as it ends; what one stage leaves of its time is the others'."""
    stages = staged(parts, here=here)
    for place, stage in enumerate(stages):
        seconds = allotted(stages[place:], deadline - time.monotonic()) - GRACE
        processes: list[subprocess.Popen[bytes]] = []
        with ThreadPoolExecutor(len(stage)) as pool:
            running = [
                pool.submit(run, part, part.until * seconds, folder, here=here, started=processes.append)
                for part in stage
            ]
            try:
                yield from (each.result() for each in as_completed(running))
            finally:
                # Parts are sessions of their own: Ctrl-C ends this process alone, which would wait for them.
                for process in processes:
                    if process.poll() is None:
                        end_group(process)


def run(
    part: Part,
    seconds: float,
    folder: Path,
    *,
    here: bool,
    started: Callable[[subprocess.Popen[bytes]], None] = lambda process: None,
) -> Ended:
    """One part, to its end or until its time and some grace are over; `started` is given its process."""
    findings, log = folder / f"{part.name}.findings", folder / f"{part.name}.log"
    command = [sys.executable, str(part.script), str(findings), "--seconds", f"{seconds:.1f}", *part.options]
    command += ["--here"] if here else []
    start = time.monotonic()
    with log.open("w", encoding="utf-8") as printed:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(part, folder, here=here),
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        started(process)
        end = ended(process, seconds)
    took = time.monotonic() - start
    said = "" if end == DONE else log.read_text(encoding="utf-8", errors="replace")[-LOG:]
    return Ended(part.name, seconds, took, end, said, tuple(findings_in(findings)))


def ended(process: subprocess.Popen[bytes], seconds: float) -> str:
    """How a part ended; whatever it started ends with it."""
    try:
        code = process.wait(max(0.0, seconds) + GRACE)
    except subprocess.TimeoutExpired:
        return f"it had not ended {GRACE:.0f} s after its time"
    finally:
        end_group(process)
    if code < 0:
        return f"it was ended by {signal.Signals(-code).name}"
    return DONE if code == 0 else f"it ended with exit code {code}"


def end_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def environment(part: Part, folder: Path, *, here: bool) -> dict[str, str]:
    """Of a part: nothing that somebody has set for moaic, and caches of its own, so that a cold start is cold."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MOAI_")}
    own = {
        "PYTHONPATH": import_path(),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    return inherited | own | dict(part.environment) | (dict(part.here) if here else {})


def import_path() -> str:
    """This checkout before whatever else the user imports from."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))


def device() -> dict[str, Any]:
    """The GPU and the versions of what runs on it, asked in a process of its own."""
    command = [sys.executable, str(BENCH / "gpu_device.py")]
    variables = {**os.environ, "PYTHONPATH": import_path(), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def named(found: Mapping[str, Any], *, here: bool) -> str:
    return "the CPU of this machine" if here else f"{found['gpu']['name']}, {found['gpu']['memory_bytes'] / 1e9:.0f} GB"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--here", action="store_true", help="try the script on the CPU, at tiny sizes")
    parser.add_argument("--seconds", type=float, default=LIMIT, help="time of the whole, where there is a GPU")
    parser.add_argument("--json", type=Path, default=ROOT / "out" / "gpu.json", help="where figures are written")
    args = parser.parse_args(arguments)
    start = time.monotonic()
    found = device()
    if found["gpu"] is None and not args.here:
        print(NO_GPU.format(torch=found["versions"]["torch"]), file=sys.stderr)
        return 2
    limit = LIMIT_HERE if args.here else args.seconds
    return measure(PARTS, found, args.json, start, limit, here=args.here)


def measure(
    parts: Sequence[Part], found: Mapping[str, Any], path: Path, start: float, limit: float, *, here: bool
) -> int:
    """Runs parts, prints and writes down what each found as soon as it has ended; the exit code."""
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    report = Report(date, named(found, here=here), found["versions"], here, limit, 0.0, ())
    path.parent.mkdir(parents=True, exist_ok=True)
    print(head(report), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for part in run_all(parts, start + limit, Path(folder), here=here):
            report = replace(report, seconds=time.monotonic() - start, parts=(*report.parts, part))
            path.write_text(to_json(report), encoding="utf-8")
            print(section(part), flush=True)
    print(foot(report))
    print(f"written to {path}")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
