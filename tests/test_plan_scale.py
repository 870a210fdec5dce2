"""`bench/plan_scale.py`: what it says of mistakes, and the models that it takes."""

from __future__ import annotations

import json
from pathlib import Path

import plan_scale
import pytest

from moaic.cli.exit_codes import WRONG
from moaic.tools.command import MISTAKE, answered

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
SMALL = {"model_type": "llama", "vocab_size": 64, "num_hidden_layers": 2, **SIZES}


def called(words: str, monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    monkeypatch.setattr("sys.argv", ["plan_scale.py", *words.split()])
    try:
        return answered(plan_scale.run)
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--cluster foo:8", "error: there is no cluster `foo:8`\nhint: choose one of a100-40, "),
        ("--cluster h100", "error: `h100` does not say how many devices there are\nhint: for example h100:64"),
        ("--cluster bench/clusters/v100.toml", "does not say how many devices there are\nhint: a host reads [[host]]"),
        ("--cluster none.toml", "error: cannot read none.toml: there is no such file"),
        ("--cluster h100:2 --model nope", "error: there is no model `nope`"),
        ("--batch 0", "error: argument --batch: `0` is not a whole number above 0"),
        ("--json nowhere/x.json", "error: argument --json: there is no folder `nowhere` to write `x.json` to"),
    ],
)
def test_a_mistake_gets_one_message(
    words: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])
    assert called(words, monkeypatch) == MISTAKE
    assert said in capsys.readouterr().err


def test_where_no_plan_fits_it_says_on_how_many_devices_one_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--model llama3-405b --layers 1 --batch 8 --sequence 8 --cluster a100-40:1"
    assert called(words, monkeypatch) == WRONG
    assert "; on 4 devices one does" in capsys.readouterr().err


def test_a_model_is_a_file_of_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "small.json"
    file.write_text(json.dumps(SMALL), encoding="utf-8")
    assert called(f"--model {file} --cluster h100:2 --batch 4 --sequence 8", monkeypatch) == 0
    assert "tokens_per_s" in capsys.readouterr().out
