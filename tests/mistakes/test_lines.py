"""Every mistaken command line gets one clear message, no trace, and the exit code of a mistake.

`lines.txt` has them in pairs of lines: a command, behind the variables that it is called with, and a part of the
message. SMALL stands for the settings of a small model.
"""

from __future__ import annotations

import contextlib
import io
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from moaic import cli
from moaic.tools import smi, switch_model
from moaic.tools.command import MISTAKE

TOOLS: dict[str, Callable[[Sequence[str]], int]] = {
    "moaic": cli.main,
    "moai-smi": smi.main,
    "moai-switch-model": switch_model.main,
}
TABLE = Path(__file__).with_name("lines.txt").read_text(encoding="utf-8").splitlines()
LINES = list(zip(TABLE[::2], TABLE[1::2], strict=True))
SMALL = "--set hidden_size=32 --set intermediate_size=64 --set num_hidden_layers=1 --set num_attention_heads=2 " + (
    "--set num_key_value_heads=2 --set vocab_size=64 --sequence 8"
)
MOST = 3
"""Lines of a message; the user's own line, quoted with a mark below it, comes on top."""

FILES = {
    "empty.moai": "",
    "words.moai": "hello world\n",
    "cut.moai": "// moai 1\nfunc @step(%x: f32[8, 4]) -> (f32[8, 4]) {\n",
    "newer.moai": "// moai 99\nfunc @step(%x: f32[8, 4]) -> (f32[8, 4]) {\n  return %x\n}\n",
    "good.moai": """// moai 1
func @step(%x: f32[8, 4] input "x", %w: f32[4, 6] param "w") -> (f32[8, 6]) {
  %y = aten.mm %x, %w : f32[8, 6]
  return %y
}
""",
    "empty.py": "",
    "good.py": "x = 1\n",
    "raises.py": "import torch\ndef f():\n    raise ValueError('no data')\nf()\n",
    "syntax.py": "def (:\n",
    "exits.py": "import sys; sys.exit(3)\n",
    "nomodel.py": "import torch\nx = torch.ones(3)\n",
    "badopt.py": "import torch\ntorch.compile(torch.nn.Linear(4, 4), backend='moai', options={'dp': 'x'})\n",
    "empty.json": "",
    "list.json": "[]",
    "wrong.json": '{"workers": "two"}',
    "fewer.json": '{"workers": 2}',
    "cfg1/moai/flavors.toml": "[[flavor]\n",
    "cfg2/moai/flavors.toml": "[[flavor]]\nname='x'\n",
    "cfg3/moai/flavors.toml": "[[flavor]]\nworkers=2\n",
    "cfg4/moai/flavors.toml": "[[flavor]]\nname='x'\nworkers=0\n",
    "cfg5/moai/flavors.toml": "[[flavor]]\nname='x'\nworkers=2\nmemory='lots'\n",
    "cfg6/moai/flavors.toml": "[[flavor]]\nname='x'\nworkers=2\ncolor='red'\n",
    "cfg7/moai/cluster.toml": "[[host]\n",
    "cfg8/moai/cluster.toml": "[[host]]\nname=3\n",
    "cfg9/moai/cluster.toml": "[[host]]\nname='a'\nworkers=2\nmemory='1GB'\n",
    "cfg10/moai/cluster.toml": "[cluster]\nlauncher='connect'\nlisten='127.0.0.1'\n",
    "st1/moai/accelerators.json": "{",
    "st2/moai/accelerators.json": "[]",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the lines name."""
    made = tmp_path_factory.mktemp("mistakes")
    for name, text in FILES.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(text, encoding="utf-8")
    (made / "binary.moai").write_bytes(b"\xff\xfe\x00\x01")
    (made / "folder").mkdir()
    return made


def test_there_are_enough() -> None:
    assert len({line for line, _ in LINES}) == len(LINES) >= 150


@pytest.mark.parametrize(("line", "message"), LINES, ids=[line for line, _ in LINES])
def test_a_mistake_gets_one_message(
    line: str, message: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = shlex.split(line.replace("SMALL", SMALL))
    monkeypatch.chdir(folder)
    for variable in ("MOAI_FLAVOR", "MOAI_PLAN", "MOAI_CACHE", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        assert called(*words) == MISTAKE
    told = said.getvalue().splitlines()
    assert message.strip() in said.getvalue()
    assert "Traceback" not in said.getvalue()
    quoted = sum(each.startswith("  ") for each in told)
    assert len(told) - quoted <= MOST, told


def called(tool: str, *arguments: str) -> int | str | None:
    """The exit code of a command."""
    try:
        return TOOLS[tool](arguments)
    except SystemExit as end:
        return end.code
