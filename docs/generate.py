"""The generated pages of the site: a hook of mkdocs that writes them whenever the site is built.

Ops, passes, commands and messages are read from their declarations. A rule is shown on an instance of its op, drawn
from the cases on which the tests prove it.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moaic.ir.layout import Mesh
from moaic.ir.ops import OPS, Kind, OpDecl, rule_of
from moaic.ir.printer import render_op
from moaic.ir.rules import Rule
from moaic.passes.pass_options import usage
from moaic.passes.registry import PASSES
from moaic.text.tables import markdown_head, markdown_row

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

    from tests.ir.op_cases import Case

ROOT = Path(__file__).parent.parent

SOURCES = ("moaic", "ir", "passes", "runtime")

DRAWN = 8
"""Instances of an op that are drawn; the one with the most factors is shown."""

GAP = "…"
"""Stands for the parts of a message that depend on the case."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by mkdocs: adds the pages."""
    from mkdocs.structure.files import File

    for place, page in PAGES.items():
        assert place not in files.src_uris, f"{place} exists as a file"
        files.append(File.generated(config, place, content=page()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for each page: removes the word `long`, by which tests know the slow blocks."""
    return re.sub(r"^( *```[a-z]+) long$", r"\1", markdown, flags=re.MULTILINE)


# Ops

OPS_HEAD = """\
# Ops

An op is one declaration in a file of `ir/ops/`, with a rule for its sharding. The rule names the *factors* of the
dims. A factor on both sides may be split over workers, or over micro-batches. A factor only on the left is summed
over, so after a split of it the result is partial. `!` marks a factor that must not be split, `1` is a dim of size
one, `(b s)` is one dim of two factors.

*Linear in* lists the operands, counted from 0, that may be partial; `0+1` means both together.

A rule depends on shapes and attributes, so each is shown on one instance of its op. The tests draw many instances,
run each op on shards in every way that its rule allows, join the shards and compare.
"""

OF_KIND: Mapping[Kind, str] = {
    Kind.NULLARY: "Computed from their attributes alone, where they are needed; splitting them is free.",
    Kind.VIEW: "They change the shape or strides of a value, at no cost.",
    Kind.LIGHT: "Bound by memory. Neighbors are fused into one kernel; they are recomputed rather than saved.",
    Kind.HEAVY: "Bound by arithmetic. They are saved rather than recomputed.",
    Kind.INSTRUCTION: "Run by the worker itself, between compiled functions: collectives along one axis of the mesh, "
    "the send of a value from one stage to the next, parts along loop axes, and calls.",
}


def ops_page() -> str:
    sections = [_section(kind) for kind in Kind]
    return "\n\n".join([OPS_HEAD.strip(), *sections]) + "\n"


def _section(kind: Kind) -> str:
    declared = [each for each in OPS.values() if each.kind is kind]
    shown = map(_op_row, declared)
    table = _table(("op", "rule", "linear in", "seen on"), shown)
    return f"## {kind.value.capitalize()}\n\n{OF_KIND[kind]}\n\n{table}"


def _op_row(declaration: OpDecl) -> tuple[str, ...]:
    if (case := _case(declaration.name)) is None:
        return f"`{declaration.name}`", "", "", ""
    names = {value: f"x{index}" for index, value in enumerate(case.op.inputs())}
    _, _, text = render_op(case.op, names | _results(case), Mesh()).partition("= ")
    rule = rule_of(case.op)
    linear = ", ".join("+".join(map(str, sorted(each))) for each in rule.linear)
    return f"`{declaration.name}`", f"`{rule}`", linear, f"`{text}`"


def _results(case: Case) -> dict[Any, str]:
    return {value: f"y{index}" for index, value in enumerate(case.op.results)}


def _case(name: str) -> Case | None:
    """The first of a few drawn instances of an op with the most factors that may be split; None without a case."""
    sys.path.insert(0, str(ROOT))
    from hypothesis import HealthCheck, Phase, given, settings

    from tests.ir.op_cases import CASES, drawn

    if name not in CASES:
        return None
    seen: list[Case] = []

    @settings(
        max_examples=DRAWN,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    @given(drawn(name))
    def draw(case: Case) -> None:
        seen.append(case)

    draw()
    return max(seen, key=lambda case: _telling(rule_of(case.op)))


def _telling(rule: Rule) -> int:
    return len(rule.sizes.keys() - rule.whole)


# Passes

PASSES_HEAD = """\
# Passes

A pass is a function from IR to IR, in one file of `passes/`. `moaic opt FILE -p outline,dp=2,lower` runs passes by
name, with the verifier before the first and after each. This is the order in which a plan uses them.
"""


def passes_page() -> str:
    rows = [(f"`{usage(each)}`", each.summary) for each in PASSES.values()]
    return f"{PASSES_HEAD}\n{_table(('pass, with its usual options', 'what it does'), rows)}\n"


# Kernels of our own

KERNELS_HEAD = """\
# Kernels of our own

Inductor compiles the functions of a plan. The kernels in `runtime/kernels/` need one pass over memory where Inductor
needs several. Each is used on the GPUs and sizes for which it was measured to be faster; the table states the gain.
Without a measurement a kernel is off. [`python bench/gpu.py`](../measured.md) measures them on the GPU of the machine:
`merge` and `exchange` beside Inductor's version, the others by a whole step of a Llama of 1B parameters, with and
without them, since Inductor fuses their ops with others.

`runtime/kernels/patterns/rewrite.py` replaces the ops of functions by kernels, forward and backward, in
layers, whose backward recomputes cheap values. `merge` and `exchange` are used between functions. A worker loads
patterns and kernels only if a kernel has a measured gain on its GPU.

Each kernel has a reference in plain PyTorch. The tests run it in Triton's interpreter on drawn shapes, element types
and strides, compare it with float64, and compile it for each of these GPUs without a spilled register.
"""

PARKED_HEAD = """\
## Parked kernels

These have no caller and are in `bench/parked_kernels/`, outside the package: the code that they would replace is at
least as good so far. `bench/test_kernels.py` and `bench/gpu.py` check and time them with the others. A kernel that
shows a gain moves to `runtime/kernels/fused/`, into the table above, and gets a caller.
"""


def kernels_page() -> str:
    from moaic.runtime.host.gpu_specs import TARGETS
    from moaic.runtime.kernels.gains import in_words
    from moaic.runtime.kernels.registry import KERNELS

    gpus = [f"{target.device} (`{target.name}`)" for target in TARGETS.values()]
    rows = [
        (
            f"`{each.name}`",
            each.summary,
            each.place,
            each.dims,
            *(in_words(each.name, target) for target in TARGETS),
        )
        for each in KERNELS.values()
    ]
    table = _table(("kernel", "what it computes", "in the place of", "sizes", *gpus), rows)
    return f"{KERNELS_HEAD}\n{table}\n\n{PARKED_HEAD}\n{_parked()}\n"


def _parked() -> str:
    """The kernels of `bench/parked_kernels`, with the reason for each."""
    sys.path.insert(0, str(ROOT / "bench"))
    from parked_kernels.catalogue import PARKED

    rows = [
        (f"`{name}`", parked.kernel.summary, parked.kernel.place, parked.kernel.dims, parked.reason)
        for name, parked in PARKED.items()
    ]
    return _table(("kernel", "what it computes", "it could replace", "sizes", "why it is parked"), rows)


# Measurements on GPUs


def gpus_page() -> str:
    """The page of the results that `bench/gpu.py` has written."""
    sys.path.insert(0, str(ROOT / "bench"))
    from gpu_report import page

    return page(ROOT / "docs" / "measured")


# The text

TEXT_HEAD = """\
# The text of the IR

The output of every stage of the compiler can be printed, parsed, verified, and used as a starting point. This is the
grammar of the text ([lark](https://github.com/lark-parser/lark) notation).
"""


def text_page() -> str:
    grammar = (ROOT / "ir" / "grammar.lark").read_text(encoding="utf-8")
    return f"{TEXT_HEAD}\n```text\n{grammar.strip()}\n```\n"


# The command line


def commands_page() -> str:
    """The output of `--help` of every installed command and of each of its subcommands."""
    parts = [
        f"## {' '.join(words)}\n\n```text\n{_help(target, *words[1:])}\n```"
        for command, target in scripts().items()
        for words in _commands(target, [command])
    ]
    return "\n\n".join(["# Command line", "Every command answers `--help`; this is what they say.", *parts]) + "\n"


def _commands(target: str, words: Sequence[str]) -> Iterator[Sequence[str]]:
    """A command, then those below it."""
    yield words
    for name in re.findall(r"^ {4}([a-z][a-z-]*)(?: {2,}|$)", _help(target, *words[1:]), re.MULTILINE):
        yield from _commands(target, [*words, name])


@cache
def _help(target: str, *words: str) -> str:
    """The help of a command, from a process of its own with the command's name and a fixed width."""
    module, _, name = target.partition(":")
    command = next(script for script, each in scripts().items() if each == target)
    start = f"import sys, {module}; sys.argv = [{command!r}, *{[*words, '--help']!r}]; sys.exit({module}.{name}())"
    environment = {"COLUMNS": "110", "NO_COLOR": "1", "PATH": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, env=environment, check=True)
    return done.stdout.rstrip()


def scripts() -> Mapping[str, str]:
    """The commands that are installed, and the function behind each."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]


# Messages


@dataclass(frozen=True, slots=True, order=True)
class Message:
    """A message to a user who made a mistake; `GAP` stands for the parts that depend on the case."""

    text: str
    hint: str
    file: str


MESSAGES_HEAD = f"""\
# All messages

Every mistake of the user ends in one message: what is wrong, where, and what to do about it. These are all of them,
read from the code; `{GAP}` stands for the parts that depend on the case. [Troubleshooting](../troubleshooting.md)
explains the most frequent ones.
"""


def messages_page() -> str:
    rows = [(_inline(each.text), _inline(each.hint), f"`{each.file}`") for each in messages()]
    return f"{MESSAGES_HEAD}\n{_table(('message', 'hint', 'said by'), rows)}\n"


def messages() -> list[Message]:
    """The messages of every Diagnostic that is made with a text of its own."""
    found: set[Message] = set()
    for path in (path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py"))):
        if path.resolve() == path:
            found.update(_messages_of(path))
    return sorted(found)


def _messages_of(path: Path) -> Iterator[Message]:
    source = path.read_text(encoding="utf-8")
    nodes = ast.walk(ast.parse(source)) if "Diagnostic(" in source else ()
    for node in (node for node in nodes if isinstance(node, ast.Call) and node.args):
        if isinstance(node.func, ast.Name) and node.func.id == "Diagnostic":
            hints = [_template(keyword.value) for keyword in node.keywords if keyword.arg == "hint"]
            text = _template(node.args[0])
            if text.strip(GAP):
                yield Message(text, next(iter(hints), ""), path.relative_to(ROOT).as_posix())


def _template(node: ast.expr) -> str:
    """The text of a literal, with a gap for each formatted value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return re.sub(f"{GAP}+", GAP, "".join(map(_template, node.values)))
    return GAP


def _inline(text: str) -> str:
    return " ".join(text.split())


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    escaped = ([cell.replace("|", r"\|") for cell in row] for row in rows)
    return "\n".join((markdown_head(head), *map(markdown_row, escaped)))


PAGES: Mapping[str, Callable[[], str]] = {
    "measured.md": gpus_page,
    "reference/ops.md": ops_page,
    "reference/passes.md": passes_page,
    "reference/own-kernels.md": kernels_page,
    "reference/text.md": text_page,
    "reference/commands.md": commands_page,
    "reference/messages.md": messages_page,
}
