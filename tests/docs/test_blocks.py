"""Every code block of the documentation runs.

A page's Python blocks run in order, in one namespace; the pages share a process, and with it the accelerator, but for
the README, which has one of its own. Of a console block each `$ command` runs, and what stands below it is what is
printed, `...` for anything. Text blocks are drawings and what long commands print.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from moaic.ir.verify import load
from tests.docs.blocks import README, ROOT, Block, blocks, pages

BLOCKS = [block for page in pages() for block in blocks(page)]
COMMANDS = re.compile(r"^\$ ", re.MULTILINE)
DRIVER = Path(__file__).with_name("run_blocks.py")


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def marked(found: Sequence[Block]) -> list[object]:
    return [pytest.param(each, id=str(each), marks=[pytest.mark.exact] if each.is_long else []) for each in found]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What moaic finds out about the machine, once for all blocks."""
    return tmp_path_factory.mktemp("known")


@pytest.fixture
def place(tmp_path: Path, known: Path) -> Path:
    """A folder like a checkout, of which the person's own files may be thrown away; in it an empty home."""
    (tmp_path / "home").mkdir()
    (tmp_path / "known").symlink_to(known)
    for path in ROOT.iterdir():
        if path.name not in (".git", "out"):
            (tmp_path / path.name).symlink_to(path)
    return tmp_path


def environment(place: Path) -> dict[str, str]:
    """Of a new user who compiles nothing and has no network to ask."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MOAI_", "XDG_"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    ours = {"MOAI_COMPILE": "0", "MOAI_LOG": "warning", "HF_HUB_OFFLINE": "1", "COLUMNS": "110"}
    return {**kept, **ours, "HOME": str(place / "home"), "MOAI_CACHE": str(place / "known"), "PATH": path}


def run(command: Sequence[str], place: Path, **more: str) -> str:
    done = subprocess.run(
        command, cwd=place, env=environment(place) | more, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    assert {block.language for block in BLOCKS} <= {"python", "console", "bash", "moai", "toml", "json", "text"}


@pytest.mark.parametrize("block", marked(of("text")))
def test_a_text_block_hides_no_command(block: Block) -> None:
    assert not COMMANDS.search(block.text)


def by_page(found: Sequence[Block]) -> list[list[Block]]:
    """Blocks of the same page together."""
    return [[block for block in found if block.page == page] for page in dict.fromkeys(block.page for block in found)]


def run_python(pages: Sequence[Sequence[Block]], place: Path) -> str:
    script = place / "blocks.json"
    texts = [[(str(block), block.text) for block in page] for page in pages]
    script.write_text(json.dumps(texts), encoding="utf-8")
    return run([sys.executable, str(DRIVER), str(script)], place, MOAI_FLAVOR="2")


def test_python_blocks_run(place: Path) -> None:
    run_python(by_page([block for block in of("python") if block.page != README and not block.is_long]), place)


def test_the_readme_trains_to_the_losses_that_it_shows(place: Path) -> None:
    printed = run_python([[block for block in of("python") if block.page == README]], place)
    shown = [
        float(found) for found in re.findall(r"^\d (\d\.\d{4})$", README.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    losses = [float(line.split()[1]) for line in printed.splitlines()[: len(shown)]]
    assert len(losses) == 5
    assert losses == pytest.approx(shown, abs=1e-3)
    assert losses[-1] < losses[0]
    assert (place / "model.pt").exists()


@pytest.mark.exact
@pytest.mark.parametrize("page", by_page(of("python")), ids=lambda page: str(page[0].page.relative_to(ROOT)))
def test_python_blocks_run_by_themselves(page: Sequence[Block], place: Path) -> None:
    """The long ones among them too."""
    run_python([page], place)


@pytest.mark.parametrize("block", marked(of("bash")))
def test_a_bash_block_runs(block: Block, place: Path) -> None:
    """What make does with its targets CI does too; here it is asked whether it knows them."""
    run(["bash", "-euo", "pipefail", "-c", re.sub(r"^make ", "make --dry-run ", block.text, flags=re.MULTILINE)], place)


@pytest.mark.parametrize("block", marked(of("console")))
def test_a_console_block_prints_what_it_says(block: Block, place: Path) -> None:
    assert block.text.startswith("$ "), "a console block begins with a command"
    for piece in COMMANDS.split(block.text)[1:]:
        command, _, printed = piece.partition("\n")
        found = run(["bash", "-c", f"{{ {command}\n}} 2>&1"], place)
        if printed.strip():
            assert fits(printed, found), f"$ {command}\nprinted\n{found}\nnot\n{printed}"


def fits(shown: str, printed: str) -> bool:
    """Whether this was printed, spaces and the memory of machines aside."""
    pattern = ".*".join(re.escape(_plain(part)) for part in shown.split("..."))
    return re.fullmatch(rf"\s*{pattern}\s*", _plain(printed), re.DOTALL) is not None


def _plain(text: str) -> str:
    return re.sub(r"[\d.]+GB", "GB", " ".join(text.split()))


@pytest.mark.parametrize("block", marked(of("moai")))
def test_a_moai_block_is_well_formed(block: Block) -> None:
    load(block.text, str(block))


@pytest.mark.parametrize("block", marked(of("toml", "json")))
def test_a_data_block_can_be_read(block: Block) -> None:
    (tomllib.loads if block.language == "toml" else json.loads)(block.text)
