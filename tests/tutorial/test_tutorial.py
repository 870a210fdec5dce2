"""The tutorials as a reader runs them: the same losses on any number of workers, and in plain PyTorch."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from common import Meter, flops_per_token, mask_pads, multiplied_parameters
from families import FAMILIES, built_in, load_model
from library_text import library_texts
from prepared import DATASET, folder_of, load_dataset
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from moaic.ir.errors import Diagnostic

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "tutorial"
PLAIN = Path(__file__).parent / "plain.py"

BLOCK_SIZE, ROWS, BATCH_SIZE = 64, 32, 4
STEPS = ROWS // BATCH_SIZE

LINE = re.compile(
    rf"^\[Step (\d+)/{STEPS}\] \| Loss: (\d+\.\d+) \| Duration: \d+\.\d\d \| "
    r"Throughput: (\d+\.\d\d) tokens/sec \| MFU: \d+\.\d%$",
    re.MULTILINE,
)

PLANS = {1: "", 2: "dp=2", 4: "dp=2,tp=2"}
"""Plans in which every worker has a share: models as small as these would be given to fewer."""

PUBLISHED = {
    ("llama2", "7b"): 6_738_415_616,
    ("llama2", "13b"): 13_015_864_320,
    ("llama3", "8b"): 8_030_261_248,
    ("mistral", "7b"): 7_241_732_096,
    ("qwen", "7b"): 7_615_616_512,
    ("baichuan2", "13b"): 13_896_668_160,
    ("gpt", "xl"): 1_557_611_200,
    ("gpt", "13b"): 12_853_386_240,
}
"""Parameters, as the models' own checkpoints have them."""


def run(command: list[str], folder: Path, **environment: str) -> str:
    """What a command prints in a folder; planned and run without compiling, so that it begins at once."""
    variables = {**os.environ, "MOAI_COMPILE": "0", "MOAI_LOG": "warning", **environment}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def prepare(family: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a preparing script, which is the same in any process."""
    flags = ["--block-size", str(BLOCK_SIZE), "--rows", str(ROWS)]
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [f"prepare_{family}.py", *flags])
    importlib.import_module(f"prepare_{family}").main()
    _, masks = torch.load(folder_of(family) / DATASET).values()
    assert 0.5 < masks.float().mean() < 0.99, "some rows are filled up"


def train(family: str, folder: Path, workers: int) -> list[float]:
    """The printed losses of a training from a prepared folder; on no workers it is plain PyTorch."""
    sizes = ["--batch-size", str(BATCH_SIZE), "--block-size", str(BLOCK_SIZE), "--model-name-or-path", "tiny"]
    flags = [*sizes, "--log-interval", "1", "--save-path", f"checkpoint-{workers}"]
    script = [str(TUTORIAL / f"train_{family}.py"), *flags]
    if workers:
        printed = run(script, folder, MOAI_FLAVOR=str(workers), MOAI_PLAN=PLANS[workers])
    else:
        printed = run([str(PLAIN), *script], folder, MOAI_DEVICE="0", OMP_NUM_THREADS="1")
    lines = LINE.findall(printed)
    assert [int(step) for step, _, _ in lines] == list(range(1, STEPS + 1)), printed
    return [float(loss) for _, loss, _ in lines]


def saved_loss(family: str, folder: Path, workers: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """The loss of a saved model on the first prepared rows, in plain PyTorch."""
    monkeypatch.chdir(folder)
    model = load_model(family, f"checkpoint-{workers}", trust_remote_code=family == "baichuan2")
    ids, mask = load_dataset(family, BLOCK_SIZE, model.config)[:BATCH_SIZE]
    with torch.no_grad():
        return model(ids, attention_mask=mask, labels=mask_pads(ids, mask), use_cache=False).loss.item()


@pytest.mark.exact
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tutorial_trains_alike_on_any_number_of_workers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    prepare(family, tmp_path, monkeypatch)
    theirs = train(family, tmp_path, workers=0)
    saved = saved_loss(family, tmp_path, 0, monkeypatch)
    assert saved < theirs[0]
    for workers in (1, 2, 4):
        ours = train(family, tmp_path, workers)
        far = max(abs(our - their) for our, their in zip(ours, theirs, strict=True))
        record_property(f"largest difference of a loss on {workers}", far)
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert saved_loss(family, tmp_path, workers, monkeypatch) == pytest.approx(saved, rel=1e-4)


def on_paper(family: str, size: str) -> Any:
    """A model without memory for its parameters."""
    models: Any = AutoModelForCausalLM
    with torch.device("meta"):
        return models.from_config(built_in(family, size), trust_remote_code=True)


def test_published_sizes_have_the_parameters_that_were_published() -> None:
    named = {(family, size) for family, found in FAMILIES.items() for size in found.sizes}
    assert {(family, size) for family, size in named if size not in ("tiny", "small")} == set(PUBLISHED)
    for (family, size), count in PUBLISHED.items():
        assert sum(parameter.numel() for parameter in on_paper(family, size).parameters()) == count, (family, size)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_and_tokenizers_agree_on_what_ends_a_text(family: str) -> None:
    tokenizer = importlib.import_module(f"prepare_{family}").make_tokenizer(["def f():", "    return 1"])
    config = built_in(family, "small")
    assert (tokenizer.eos_token_id, tokenizer("x")["input_ids"][-1]) == (config.eos_token_id, config.eos_token_id)
    assert tokenizer.bos_token_id in (config.bos_token_id, None)


@pytest.mark.parametrize("family", FAMILIES)
def test_flops_are_those_that_a_step_does(family: str) -> None:
    """All but the norms' and biases', whose parameters multiply one number each, not a matrix's row."""
    model = on_paper(family, "small")
    model.set_attn_implementation("eager")
    ids = torch.ones((2, 64), dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False).loss.backward()
    ours = ids.numel() * flops_per_token(model.config, multiplied_parameters(model), ids.shape[1])
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_a_line_says_what_was_done_since_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line after as many tokens as the others, and MFU in the measure of its own throughput."""
    peak = 1e9
    monkeypatch.setattr(torch.get_device_module("moai"), "peak_flops", {torch.float32: peak}.get)
    model = on_paper("llama2", "tiny")
    meter = Meter(model, STEPS)
    for step in (1, 2):
        meter.count(torch.zeros((BATCH_SIZE, BLOCK_SIZE)))
        time.sleep(0.05)
        line = meter.line(loss=1.25)
        found = LINE.match(line)
        assert found is not None, line
        assert (found[1], found[2]) == (str(step), "1.250000")
        rate, used = float(found[3]), float(line.partition("MFU: ")[2].rstrip("%")) / 100
        assert rate <= BATCH_SIZE * BLOCK_SIZE / 0.05
        assert used == pytest.approx(
            rate * flops_per_token(model.config, multiplied_parameters(model), BLOCK_SIZE) / peak, abs=1e-3
        )


def test_labels_leave_padding_out() -> None:
    ids, mask = torch.tensor([[5, 6, 0], [7, 0, 0]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert mask_pads(ids, mask).tolist() == [[5, 6, -100], [7, -100, -100]]


def test_a_peak_is_of_floating_point() -> None:
    with pytest.raises(Diagnostic, match="int64 has none"):
        torch.get_device_module("moai").peak_flops(torch.int64)


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The configuration of a small model, beside rows that another one was prepared for."""
    monkeypatch.chdir(tmp_path)
    folder = folder_of("gpt")
    folder.mkdir(parents=True)
    ids = torch.full((4, BLOCK_SIZE), 60)
    torch.save({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, folder / DATASET)
    return built_in("gpt", "tiny")


def test_what_was_not_prepared_is_said(prepared: Any) -> None:
    with pytest.raises(SystemExit, match=r"no out/tutorial/qwen/dataset.pt yet; .*prepare_qwen.py --block-size"):
        load_dataset("qwen", BLOCK_SIZE, prepared)
    with pytest.raises(SystemExit, match=r"prepared with 64 tokens, not 99; .*prepare_gpt.py --block-size 99"):
        load_dataset("gpt", 99, prepared)
    prepared.max_position_embeddings = 16
    with pytest.raises(SystemExit, match="the model reads at most 16 tokens"):
        load_dataset("gpt", BLOCK_SIZE, prepared)
    prepared.vocab_size = 60
    with pytest.raises(SystemExit, match=r"another vocabulary than the model's 60 tokens; .*FOLDER_OF_THE_MODEL"):
        load_dataset("gpt", 16, prepared)


def test_a_model_that_is_not_there_and_a_batch_that_is_too_large_are_said() -> None:
    with pytest.raises(SystemExit, match="7c: there is no such folder; built-in sizes are tiny, small, 7b, 13b"):
        load_model("llama2", "7c")
    with pytest.raises(SystemExit, match="do not fill one batch"):
        Meter(on_paper("llama2", "tiny"), steps=0)
    with pytest.raises(SystemExit, match="definitions, not 1000000"):
        library_texts(1_000_000)
