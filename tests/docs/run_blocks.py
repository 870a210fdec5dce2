"""Runs blocks of Python: `run_blocks.py FILE`, a JSON list of pages, each a list of places and texts.

The blocks of a page run one after the other in one namespace.
"""

import json
import linecache
import sys
import types
from pathlib import Path


def run(page: list[tuple[str, str]]) -> None:
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    for place, text in page:
        # Dynamo and tracebacks read the lines of what they name.
        linecache.cache[place] = (len(text), None, text.splitlines(keepends=True), place)
        exec(compile(text, place, "exec"), module.__dict__)


if __name__ == "__main__":
    for blocks in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        run(blocks)
