"""Train a tiny Llama on GPUs that are not here: workers interpret the Triton kernels that GPUs would run.

Slow, and exact: the same training on one CPU stands beside it. At the end it prints which kernels ran how often.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

USUAL: dict[str, str] = {"MOAI_WORKERS": "triton", "MOAI_KERNELS": "all", "MOAI_FLAVOR": "2", "MOAI_COMPILE": "wait"}
"""Two GPUs, moaic's own kernels wherever they can run, and no step op by op."""

VOCABULARY = 128
ROWS, LENGTH = 4, 16


def model() -> nn.Module:
    torch.manual_seed(0)
    config: Any = LlamaConfig
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(config(**sizes, vocab_size=VOCABULARY, use_cache=False))


def train(trained: Any, parameters: list[nn.Parameter], batches: list[Tensor], device: str) -> list[float]:
    """The loss of each step."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    losses: list[float] = []
    for batch in batches:
        ids = batch.to(device)
        loss: Tensor = trained(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"{device} step {len(losses)} loss {losses[-1]:.6f}", flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", default="", help="decisions of the plan, such as dp=2; others are the planner's")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    for name, value in USUAL.items():
        os.environ.setdefault(name, value)
    options: dict[str, Any] = dict(part.split("=") for part in arguments.plan.split(",") if part)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator) for _ in range(arguments.steps)]

    here, there = model(), model().to("moai")
    expected = train(here, list(here.parameters()), batches, "cpu")
    compiled = torch.compile(there, backend="moai", options=options)
    found = train(compiled, list(there.parameters()), batches, "moai")

    from moaic.runtime.controller import session

    launches = Counter[str]()
    for worker in session.accelerator().stats().workers:
        launches.update(worker.launches)
    print("launches of kernels, all workers:")
    for name, count in launches.most_common():
        print(f"{count:6}  {name}")
    apart = max(abs(one - other) for one, other in zip(expected, found, strict=True))
    print(f"largest difference of a loss from the CPU's: {apart:.1e}")


if __name__ == "__main__":
    main()
