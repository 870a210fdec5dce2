"""All architectures, each in its own process, and the page of the results: `make architectures`.

An interrupted sweep continues: its results are in out/architectures, one line per architecture. Arguments select kinds
(`causal image`) or architectures (`causal/llama`); the default is all.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.architectures.tiny import KINDS, families

ROOT = Path(__file__).parents[2]
FOUND = ROOT / "out" / "architectures" / "found.jsonl"
PAGE = ROOT / "docs" / "architectures.md"
SECONDS = 400
COLUMNS = ("capture", "auto", "micro_batches=2", "dp=2", "tp=2", "cp=2", "pp=2")
CLASSES = ("equal", "refused", "wrong", "unclear")

Found = dict[str, tuple[str, str]]
"""What was tried, its class and why."""


def chosen(names: Sequence[str]) -> Iterator[str]:
    for kind in KINDS:
        for family in families(kind):
            if not names or kind in names or f"{kind}/{family}" in names:
                yield f"{kind}/{family}"


def tried(name: str) -> Found:
    command = [sys.executable, "-m", "tests.architectures.prove", *name.split("/")]
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired as late:
        return {**_parsed((late.stdout or b"").decode()), "end": ("unclear", f"more than {SECONDS} s")}
    found = _parsed(ended.stdout)
    if ended.returncode:
        found["end"] = ("unclear", ended.stderr.strip().split("\n")[-1][:300])
    return found


def _parsed(lines: str) -> Found:
    return {name: (verdict, why) for name, verdict, why in map(json.loads, lines.splitlines())}


def known() -> dict[str, Found]:
    if not FOUND.exists():
        return {}
    lines = map(json.loads, FOUND.read_text(encoding="utf-8").splitlines())
    return {name: {key: (verdict, why) for key, (verdict, why) in found.items()} for name, found in lines}


def run(names: Sequence[str]) -> None:
    FOUND.parent.mkdir(parents=True, exist_ok=True)
    before = known()
    for name in chosen(names):
        if name in before:
            continue
        began = time.monotonic()
        found = tried(name)
        with FOUND.open("a", encoding="utf-8") as file:
            file.write(json.dumps([name, found]) + "\n")
        worst = " ".join(f"{key}:{verdict}" for key, (verdict, _) in found.items() if verdict != "equal")
        sys.stdout.write(f"{name} {time.monotonic() - began:.0f} s {worst or 'equal'}\n")
        sys.stdout.flush()


def page(found: dict[str, Found]) -> str:
    """Counts by plan, then every architecture that is not equal throughout, with the reason."""
    built = {name: each for name, each in found.items() if "build" not in each}
    return "\n".join([*_head(found, built), *_counts(built), "", *_others(built), "", *_not_built(found), ""])


def _head(found: dict[str, Found], built: dict[str, Found]) -> Iterator[str]:
    kinds = Counter(name.split("/")[0] for name in built)
    yield "# Architectures"
    yield ""
    yield "<!-- Written by `make architectures`. -->"
    yield ""
    yield f"Tiny forms of {len(built)} architectures of `transformers`, of {len(found)} that were tried:"
    yield ", ".join(f"{count} {kind}" for kind, count in kinds.items()) + "."
    yield "Rows are padded to unequal lengths. *Capture*: without dropout, loss and all gradients beside plain PyTorch,"
    yield "in float32. The plans: with the dropouts that are published, on virtual ranks in float64, beside the plan"
    yield "for one device, which draws the same masks. Where a model breaks into several graphs, each takes of a plan"
    yield "what it can."
    yield ""


def _counts(built: dict[str, Found]) -> Iterator[str]:
    yield "| plan | " + " | ".join(CLASSES) + " |"
    yield "|---|" + "---:|" * len(CLASSES)
    for column in COLUMNS:
        counted = Counter(each[column][0] for each in built.values() if column in each)
        yield f"| `{column}` | " + " | ".join(str(counted[each]) for each in CLASSES) + " |"


def _others(built: dict[str, Found]) -> Iterator[str]:
    yield "| architecture | plan | found | why |"
    yield "|---|---|---|---|"
    for name, each in sorted(built.items()):
        for column, (verdict, why) in each.items():
            if verdict != "equal":
                yield f"| {name} | `{column}` | {verdict} | {_cell(why)} |"


def _not_built(found: dict[str, Found]) -> Iterator[str]:
    names = [f"{name} ({_cell(each['build'][1])})" for name, each in sorted(found.items()) if "build" in each]
    if names:
        yield "Not built so small, or not trained by plain PyTorch: " + "; ".join(names) + "."


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").replace("`", "'").split())[:160]


if __name__ == "__main__":
    run(sys.argv[1:])
    PAGE.write_text(page(known()), encoding="utf-8")
