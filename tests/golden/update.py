"""`python -m tests.golden.update` accepts a change; `python -m tests.golden.update FOLDER` writes all texts there.

If a digest differs and no text is kept, run the second before and after the change and compare the texts.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.golden.programs import ALONE, GOLDEN, PAIRS, TABLE, rows, text_file, text_of, versions


def main(arguments: list[str]) -> None:
    if arguments:
        folder = Path(arguments[0])
        folder.mkdir(parents=True, exist_ok=True)
        for model, plan in PAIRS:
            (folder / f"{model},{plan}.moai").write_text(text_of(model, plan), encoding="utf-8")
        return
    lines = [f"# {versions()}", *map(str, rows())]
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    for model in GOLDEN:
        text_file(model).write_text(text_of(model, ALONE), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
