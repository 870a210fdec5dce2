from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

SOURCES = ("moaic", "ir", "passes", "runtime")
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with every warning an error and no way to the network."""
    folder = tmp_path_factory.mktemp("site")
    offline = "import socket; socket.socket.connect = None"
    start = f"{offline}; from mkdocs.__main__ import cli; cli(['build', '--strict', '--site-dir', {str(folder)!r}])"
    done = subprocess.run([sys.executable, "-c", start], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_is_built_without_a_warning(site: Path) -> None:
    assert (site / "index.html").exists()
    assert (site / "search" / "search_index.json").exists()


def test_the_site_fetches_nothing(site: Path) -> None:
    away = r"\"?(?:https?:)?//"
    fetched = re.compile(rf"<(?:script|img|source|iframe)[^>]*\bsrc={away}|<link[^>]*stylesheet[^>]*href={away}")
    imported = re.compile(r"@import[^;]*//|url\(\"?(?:https?:)?//")
    for page in site.rglob("*.html"):
        assert not fetched.search(page.read_text(encoding="utf-8")), page
    for sheet in site.rglob("*.css"):
        assert not imported.search(sheet.read_text(encoding="utf-8")), sheet


def test_references_name_what_is_declared(site: Path) -> None:
    from moaic.ir.ops import OPS
    from moaic.passes.registry import PASSES

    ops, passes = ((site / "reference" / f"{name}.html").read_text(encoding="utf-8") for name in ("ops", "passes"))
    assert all(name in ops for name in OPS)
    assert all(each.summary.partition("`")[0] in html.unescape(passes) for each in PASSES.values())
    assert "m k, k n -&gt; m n" in ops


def test_commands_are_those_that_are_installed(site: Path) -> None:
    import generate

    page = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    assert all(f"usage: {command} " in page for command in generate.scripts())
    assert "usage: moaic capture " in page
    assert "usage: moaic cluster check " in page


def test_every_quoted_message_is_one_that_is_said() -> None:
    """A heading of the troubleshooting page quotes a message; `…` stands for what is filled in."""
    import generate

    said = {each.text for each in generate.messages()}
    quoted = re.findall(r"^### (.+)$", page("troubleshooting"), re.MULTILINE)
    texts = "\n".join(path.read_text(encoding="utf-8") for folder in SOURCES for path in (ROOT / folder).rglob("*.py"))
    assert len(quoted) > 10
    for message in quoted:
        pieces = [piece for piece in re.split(r"…|`", message) if piece.strip()]
        assert message in said or all(piece in texts for piece in pieces), message


def test_the_environment_is_documented_whole() -> None:
    names = re.compile(r"\bMOAI_[A-Z_]+\b")
    code = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py") if path.resolve() == path]
    read = {name for path in code for name in names.findall(path.read_text(encoding="utf-8"))}
    assert set(re.findall(r"^\| `(MOAI_[A-Z_]+)` \|", page("plans"), re.MULTILINE)) == read


def test_every_option_of_a_plan_is_documented() -> None:
    from dataclasses import fields

    from moaic.compile.planning import NO_DECISIONS
    from moaic.passes.config import Request

    options = re.findall(r"^\| `([a-z_]+)` \|", page("plans"), re.MULTILINE)
    assert set(options) == {*(field.name for field in fields(Request)), *NO_DECISIONS}


def test_pages_lead_to_files_that_exist() -> None:
    """mkdocs checks what lies in docs; this checks what is named in code style."""
    named = re.compile(r"`((?:moaic|ir|passes|runtime|tests|bench|examples|tutorial|docs)/[\w./-]*)`")
    for path in PAGES:
        for name in named.findall(path.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{path} names {name}"
