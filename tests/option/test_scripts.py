"""A tutorial's script as printed, except for the path of the model, in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.functional import pad
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from moaic.option.transformers_adamw import AdamW

ROOT = Path(__file__).parents[2]

SCRIPT = """
import copy
import torch
from argparse import ArgumentParser
from transformers import AutoModelForCausalLM, AdamW, AutoTokenizer

def main(args):
    {line}

    model = AutoModelForCausalLM.from_pretrained(args.model)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model.cuda()
    model.train()

    torch.manual_seed(args.seed)
    dataset = torch.load("dataset.pt")

    # Create a DataLoader for the training set
    train_dataloader = torch.utils.data.DataLoader(
        dataset,
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
    )

    # Mask pad tokens for training
    def mask_pads(input_ids, attention_mask, ignore_index = -100):
        idx_mask = attention_mask
        labels = copy.deepcopy(input_ids)
        labels[~idx_mask.bool()] = ignore_index
        return labels

    # Define AdamW optimizer
    optim = AdamW(model.parameters(), lr=args.lr)

    # Start training
    for epoch in range(args.epoch):
        for i, batch in enumerate(train_dataloader, 0):
            input_ids = batch["input_ids"]
            attn_mask = batch["attention_mask"]
            labels = mask_pads(input_ids, attn_mask)
            outputs = model(
                input_ids.cuda(),
                attention_mask=attn_mask.cuda(),
                labels=labels.cuda(),
                use_cache=False,
            )

            loss = outputs[0]
            loss.backward()

            optim.step()
            model.zero_grad(set_to_none=True)
            print("LOSS", loss.item())
    model.save_pretrained("saved")
    tokenizer.save_pretrained("saved")
    print("PLAN", torch.moai.report()["plan"])

parser = ArgumentParser()
parser.add_argument("--model", default="model")
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--epoch", type=int, default=2)
parser.add_argument("--seed", type=int, default=7)
main(parser.parse_args())
"""

ENABLE = "MOAI_ENABLE_ADVANCED_PARALLELIZATION"
LINE = "torch.moreh.option.enable_advanced_parallelization()"


def run(folder: Path, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script in a folder, as a person starts it."""
    (folder / "train.py").write_text(script, encoding="utf-8")
    ambient = {**os.environ, "PYTHONPATH": str(ROOT), "MOAI_FLAVOR": "2", "MOAI_COMPILE": "0", "MOAI_LOG": "warning"}
    return subprocess.run(
        [sys.executable, "train.py", *arguments],
        cwd=folder,
        env={**ambient, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def prepare(folder: Path) -> None:
    """What the tutorial has before the script runs: a model, its tokenizer, a dataset with padding."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig.from_dict({"vocab_size": 64, "bos_token_id": None, "eos_token_id": None, **sizes})
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0").save_pretrained(folder / "model")
    lengths = [12, 16, 9, 16, 5, 14, 16, 11, 13]
    rows = [torch.randint(1, 64, (length,)) for length in lengths]
    dataset = [
        {
            "input_ids": pad(row, (0, 16 - len(row))),
            "attention_mask": pad(torch.ones_like(row), (0, 16 - len(row))),
        }
        for row in rows
    ]
    torch.save(dataset, folder / "dataset.pt")


def plain_losses(folder: Path) -> list[float]:
    """The same loop without an accelerator."""
    model = LlamaForCausalLM.from_pretrained(folder / "model").train()
    torch.manual_seed(7)
    loader = torch.utils.data.DataLoader(torch.load(folder / "dataset.pt"), batch_size=4, shuffle=True, drop_last=True)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    for _ in range(2):
        for batch in loader:
            ids, mask = batch["input_ids"], batch["attention_mask"]
            labels = ids.masked_fill(mask == 0, -100)
            loss = model(ids, attention_mask=mask, labels=labels, use_cache=False)[0]
            loss.backward()
            optimizer.step()
            model.zero_grad(set_to_none=True)
            losses.append(loss.item())
    return losses


def test_a_tutorial_s_script_runs_as_it_is(tmp_path: Path) -> None:
    prepare(tmp_path)
    done = run(tmp_path, SCRIPT.format(line=LINE))
    assert done.returncode == 0, done.stderr
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    losses = [float(value) for word, value in lines if word == "LOSS"]
    assert losses == pytest.approx(plain_losses(tmp_path), rel=1e-4)
    assert [word for word, _ in lines][-1] == "PLAN"
    assert LlamaForCausalLM.from_pretrained(tmp_path / "saved").config.vocab_size == 64


@pytest.mark.exact
def test_it_runs_without_the_line(tmp_path: Path) -> None:
    prepare(tmp_path)
    done = run(tmp_path, SCRIPT.format(line="pass"), **{ENABLE: "1"})
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("LOSS")]
    assert losses == pytest.approx(plain_losses(tmp_path), rel=1e-4)


ASK = """
import torch
from transformers import AdamW
print(torch.cuda.is_available(), torch.ones(2).cuda().device, AdamW.__name__)
torch.moai.option.disable_advanced_parallelization()
import transformers
print(torch.cuda.is_available(), hasattr(transformers, "AdamW"))
"""


def test_the_environment_says_the_line(tmp_path: Path) -> None:
    done = run(tmp_path, ASK, **{ENABLE: "1"})
    assert done.stdout.splitlines() == ["True moai:0 AdamW", "False False"], done.stderr


def test_a_mistake_in_the_environment_is_one_message(tmp_path: Path) -> None:
    done = run(tmp_path, "import torch", **{ENABLE: "maybe"})
    assert done.returncode == 1
    assert done.stderr == f"error: invalid value `maybe` for {ENABLE}\nhint: set 1, or leave it out\n"
