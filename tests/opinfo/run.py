"""The sweep over PyTorch's op database, in several processes, so that a crash of one case affects no other.

An interrupted sweep continues. Its results are in a folder named after the sources, so that other sources start a new
sweep.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from tests.opinfo.page import PAGE, page, table
from tests.opinfo.record import Case, Line, Outcome, left, lines, results

ROOT: Final = Path(__file__).parent.parent.parent

PATIENCE: Final = 150
"""Seconds that one sample may take."""

CHUNK: Final = 60
"""Cases per process."""


def run_chunk(cases: Sequence[Case], path: Path) -> None:
    """Runs cases in one process after another, until all of them are done."""
    while rest := left(cases, lines(path)):
        given = path.with_suffix(".json")
        given.write_text(json.dumps([[case.area, case.name, begin] for case, begin in rest]), encoding="utf-8")
        code = _run_process([sys.executable, "-m", "tests.opinfo.worker", str(given), str(path)], path)
        written = lines(path)
        if not written or written[-1].outcome not in (Outcome.BEGUN, Outcome.LOST, Outcome.DONE):
            raise RuntimeError(f"a process of the sweep ended with {code}: see {path.with_suffix('.log')}")
        if written[-1].outcome is Outcome.BEGUN:
            text = f"the process ended with {code}" if code is not None else f"nothing came for {PATIENCE} s"
            with path.open("a", encoding="utf-8") as out:
                out.write(Line(written[-1].case, written[-1].sample, Outcome.LOST, text).text() + "\n")


def _run_process(command: list[str], path: Path) -> int | None:
    """The exit code; None for a process that was ended because nothing came of it."""
    environment = {**os.environ, "MOAI_FLAVOR": "2", "MOAI_LOG": "warning", "OMP_NUM_THREADS": "1"}
    with path.with_suffix(".log").open("a", encoding="utf-8") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
    seen, since = -1, time.monotonic()
    while process.poll() is None:
        time.sleep(0.2)
        size = path.stat().st_size if path.exists() else 0
        if size != seen:
            seen, since = size, time.monotonic()
        elif time.monotonic() - since > PATIENCE:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None
    return process.returncode


def state() -> str:
    """Names the sources that the sweep is about."""
    digest = hashlib.sha256()
    for folder in ("moaic", "ir", "passes", "runtime", "tests/opinfo"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def main() -> None:
    from tests.opinfo.areas import AREAS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "out" / "opinfo" / state())
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="processes at a time")
    parser.add_argument("--areas", nargs="*", default=list(AREAS), help="some of the areas; the page is not written")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    with (given.folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with ThreadPoolExecutor(given.jobs) as pool:
            for area in given.areas:
                cases = [Case(area, name) for name in AREAS[area].names()]
                chunks = [cases[start : start + CHUNK] for start in range(0, len(cases), CHUNK)]
                paths = [given.folder / f"{area.replace(' ', '-')}-{number}.jsonl" for number in range(len(chunks))]
                list(pool.map(run_chunk, chunks, paths))
    found = results(given.folder)
    sys.stdout.write(table(found) + "\n")
    if given.areas == list(AREAS):
        PAGE.write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
