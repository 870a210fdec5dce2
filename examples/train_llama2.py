"""Trains a Llama from its config on the Python standard library's own source text.

It is an ordinary PyTorch script for one device. `--device cpu` is plain PyTorch; `--device moai` trains on every worker
of this machine. Between the two differ the device and the line that compiles the model, nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from byte_pairs import VOCABULARY, train_bytes
from library_text import definitions, read, source_files
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

PAD = 0
IGNORED = -100
"""Label of a position that the loss leaves out."""

TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
"""Largest relative distance between the loss here and that of the saved model in plain transformers."""

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Step:
    """What one step showed. Tokens are all positions of the batch, padding included."""

    step: int
    loss: float
    seconds: float
    tokens_per_second: float


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="moai", choices=("moai", "cpu"))
    parser.add_argument("--plan", default="", help='options of the plan, e.g. "dp=2,micro_batches=4"; else automatic')
    parser.add_argument("--dtype", default="float32", choices=tuple(TOLERANCE))
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--intermediate", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure of the run")
    parser.add_argument("--save", type=Path, metavar="DIR", help="save the model and check it in plain transformers")
    return parser.parse_args()


def load_tokenizer(files: list[Path]) -> Tokenizer:
    """A byte-level BPE of VOCABULARY pieces, trained on `files` once and kept in the person's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moaic"
    kept = cache / f"tokenizer-{sys.version_info.major}.{sys.version_info.minor}-{VOCABULARY}.json"
    if kept.exists():
        return Tokenizer.from_file(str(kept))
    tokenizer = train_bytes((read(path) for path in files), ["<pad>"])
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = kept.with_suffix(f".{os.getpid()}")
    tokenizer.save(str(unfinished))
    unfinished.replace(kept)
    return tokenizer


def sequences(tokenizer: Tokenizer, path: Path, length: int) -> Iterator[list[int]]:
    """One file as token lists of at most `length`: as many whole top-level definitions as fit, long ones cut."""
    held: list[int] = []
    for encoding in tokenizer.encode_batch(definitions(path)):
        ids = encoding.ids
        if len(held) + len(ids) > length:
            yield held
            held = []
        while len(ids) > length:
            yield ids[:length]
            ids = ids[length:]
        held = held + ids
    yield held


def batches(tokenizer: Tokenizer, files: list[Path], count: int, size: int, length: int, seed: int) -> list[Batch]:
    """`count` batches of `size` sequences, padded to `length`, drawn from shuffled files."""
    order = random.Random(seed)
    files = order.sample(files, len(files))
    drawn: list[list[int]] = []
    while len(drawn) < count * size:
        for path in files:
            drawn += [ids for ids in sequences(tokenizer, path, length) if len(ids) > 1]
            if len(drawn) >= 4 * count * size:
                break
    order.shuffle(drawn)
    return [pad(drawn[i * size : (i + 1) * size], length) for i in range(count)]


def pad(rows: list[list[int]], length: int) -> Batch:
    def fill(row: list[int], value: int) -> list[int]:
        return row + [value] * (length - len(row))

    return {
        "input_ids": torch.tensor([fill(row, PAD) for row in rows]),
        "attention_mask": torch.tensor([fill([1] * len(row), 0) for row in rows]),
        "labels": torch.tensor([fill(row, IGNORED) for row in rows]),
    }


def plan_options(text: str) -> dict[str, Any]:
    """`dp=2,recompute=full` as the options of the compiler."""
    pairs = (item.partition("=") for item in text.split(",") if item)
    return {name.strip(): value.strip() for name, _, value in pairs}


def build(args: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        max_position_embeddings=args.seq,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(getattr(torch, args.dtype))


def train(model: Any, optimizer: torch.optim.Optimizer, data: list[Batch], device: str) -> Iterator[Step]:
    """One optimizer step per batch; a step's seconds end when the device has done all of it."""
    synchronize = torch.get_device_module(device).synchronize
    for number, batch in enumerate(data, start=1):
        start = time.perf_counter()
        loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize()
        seconds = time.perf_counter() - start
        yield Step(number, loss.item(), seconds, batch["input_ids"].numel() / seconds)


def show(steps: Iterator[Step], count: int, console: Console) -> list[Step]:
    """Runs the steps behind a progress bar, a line for about thirty of them."""
    columns = (TextColumn("training"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[now]}"))
    bar = Progress(*columns, TimeElapsedColumn(), console=console)
    every = max(1, count // 30)
    done: list[Step] = []
    with bar:
        task = bar.add_task("", total=count, now="first step: compiling")
        for step in steps:
            done.append(step)
            rate = f"{step.tokens_per_second:,.0f} tokens/s"
            bar.update(task, advance=1, now=rate)
            if step.step == 1 or step.step % every == 0:
                console.print(f"step {step.step:4d}  loss {step.loss:.4f}  {step.seconds:7.3f} s  {rate}")
    return done


def check_saved(model: Any, batch: Batch, args: argparse.Namespace) -> tuple[float, float]:
    """The loss of `batch` here and by the saved model in plain transformers on the CPU."""
    plain = LlamaForCausalLM.from_pretrained(args.save, dtype=getattr(torch, args.dtype))
    with torch.no_grad():
        here = model(**{name: tensor.to(args.device) for name, tensor in batch.items()}).loss.item()
        there = plain(**batch).loss.item()
    if not abs(here - there) <= TOLERANCE[args.dtype] * abs(there):
        sys.exit(f"the saved model has loss {there}, not {here}")
    return here, there


def sparkline(values: list[float]) -> str:
    low, high = min(values), max(values)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (value - low) / ((high - low) or 1))] for value in values)


def figures(steps: list[Step], args: argparse.Namespace) -> dict[str, Any]:
    """Every figure of the run; the compiler's own are the plan and what capture, planning and compiling took."""
    usual = median(step.seconds for step in steps[1:] or steps)
    compiler: dict[str, Any] = {"plan": "", "timings": {}}
    if args.device == "moai":
        compiler = torch.get_device_module(args.device).report()
    return {
        "settings": {
            name: value if isinstance(value, int | float) else str(value) for name, value in vars(args).items()
        },
        "first_step_seconds": steps[0].seconds,
        "median_step_seconds": usual,
        "tokens_per_second": args.batch * args.seq / usual,
        "steps": [asdict(step) for step in steps],
        **compiler,
    }


def show_figures(run: dict[str, Any], console: Console) -> None:
    losses = [step["loss"] for step in run["steps"]]
    shown = losses[:: max(1, len(losses) // 60)]
    console.print(f"loss {losses[0]:.3f} {sparkline(shown)} {losses[-1]:.3f}")
    console.print(f"median step {run['median_step_seconds']:.3f} s, {run['tokens_per_second']:,.0f} tokens/s", end="; ")
    times = {"first step": run["first_step_seconds"], **run["timings"]}
    console.print(", ".join(f"{name.removesuffix('_s')} {seconds:.1f} s" for name, seconds in times.items()))
    if run["plan"]:
        console.print(run["plan"], markup=False)


def main() -> None:
    args = arguments()
    disable_progress_bar()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    files = source_files()
    data = batches(load_tokenizer(files), files, args.steps + 1, args.batch, args.seq, args.seed)
    model: Any = build(args).to(args.device)
    parameters: int = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"Llama, {parameters / 1e6:.1f} M parameters, {args.layers} layers, {args.dtype}, on device {args.device}; "
        f"{args.steps} steps of {args.batch} x {args.seq} tokens"
    )

    compiled = torch.compile(model, backend="moai", options=plan_options(args.plan)) if args.device == "moai" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    steps = show(train(compiled, optimizer, data[:-1], args.device), args.steps, console)

    run = figures(steps, args)
    show_figures(run, console)
    if args.json:
        args.json.write_text(json.dumps({"parameters": parameters, **run}, indent=1) + "\n", encoding="utf-8")
    if args.save:
        model.save_pretrained(args.save)
        here, there = check_saved(compiled, data[-1], args)
        console.print(f"saved to {args.save}; loss on held-out text {here:.5f} here, {there:.5f} in plain transformers")


if __name__ == "__main__":
    main()
