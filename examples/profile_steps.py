"""Profiles three training steps: one Chrome trace with this program's own activity and a track for every worker.

Open the file in https://ui.perfetto.dev or chrome://tracing.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else "trace.json"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)).to("moai")
    compiled = torch.compile(model, backend="moai")
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(64, 64, device="moai"), torch.randint(8, (64,), device="moai")

    def step() -> None:
        nn.functional.cross_entropy(compiled(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # planned and compiled before anything is profiled
    moai: Any = torch.get_device_module("moai")
    with moai.profiler.profile() as profiler:
        for _ in range(3):
            step()
    profiler.export_chrome_trace(path)
    for rank, spans in profiler.spans.items():
        busy = sum(span.end - span.begin for span in spans) / 1e6
        print(f"worker {rank}: {len(spans)} spans, {busy:.1f} ms busy")


if __name__ == "__main__":
    main()
