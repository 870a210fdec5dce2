"""One peer's run in one process of it: the example's model, data and optimizer under one way of training.

Prints a JSON line per step: its number, its loss, the seconds that it took and the clock at its end. Several processes
of one peer find each other through RANK, WORLD_SIZE and a rendezvous file; each takes its share of every batch.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from train_llama2 import build


def eager(model: Any) -> Any:
    return model


def inductor(model: Any) -> Any:
    compiled: Any = torch.compile(model)
    return compiled


def ddp(model: Any) -> Any:
    compiled: Any = torch.compile(DistributedDataParallel(model, gradient_as_bucket_view=True))
    return compiled


def fsdp2(model: Any) -> Any:
    """Each layer compiled and sharded, then the rest: the usual recipe."""
    policy = MixedPrecisionPolicy()
    for layer in model.model.layers:
        layer.compile()
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def moai(model: Any) -> Any:
    compiled: Any = torch.compile(model, backend="moai")
    return compiled


WAYS: Mapping[str, Callable[[Any], Any]] = {f.__name__: f for f in (eager, inductor, ddp, fsdp2, moai)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("way", choices=tuple(WAYS))
    parser.add_argument("data", help="file of batches")
    parser.add_argument("--rendezvous", help="file through which several processes meet")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--intermediate", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=8)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{args.rendezvous}", rank=rank, world_size=ranks)
    device = "moai" if args.way == "moai" else "cpu"
    data = torch.load(args.data)
    model: Any = build(args)
    model.to(device)
    trained = WAYS[args.way](model)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3, fused=True)
    for number in range(args.steps):
        share = {name: tensor.chunk(ranks)[rank] for name, tensor in data[number % len(data)].items()}
        start = time.perf_counter()
        loss = trained(**{name: tensor.to(device) for name, tensor in share.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.get_device_module(device).synchronize()
        seconds = time.perf_counter() - start
        print(json.dumps({"step": number, "loss": loss.item(), "seconds": seconds, "clock": time.time()}), flush=True)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
